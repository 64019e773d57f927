// y = x w^T + bias in fp32 for a few rows of x, as in decoding, where the time is that of reading w, in fp32, bf16 or fp16:
// each row of w is read once, in the order of memory, and multiplied with all rows of x, which stay in the first cache.
#include <pybind11/pybind11.h>

#include "vectors.h"

namespace py = pybind11;

namespace {

constexpr int64_t kAhead = 4096;   // bytes of w that are fetched before they are needed
constexpr int64_t kRun = 1 << 16;  // numbers of w that a thread takes at a time

struct Fp16 {
  uint16_t bits;
};

inline V load(const Fp16* from) {
#ifdef __AVX512F__
  return same_bits<V>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
  return same_bits<V>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Lanes of two vectors, each the sums of some numbers in 2 kHalf lanes apiece: the same sums in kHalf lanes apiece.
template <int kHalf>
inline V halve(V a, V b) {
  I low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / kHalf * 2 * kHalf + i % kHalf;
    high[i] = low[i] + kHalf;
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// The totals of kCount (a power of two, at most kLanes) vectors in as many lanes.
template <int kCount, int kHalf = kLanes / 2>
inline V totals(V* v) {
  constexpr int kLeft = (kCount + 1) / 2;
  for (int i = 0; i < kLeft; ++i) v[i] = halve<kHalf>(v[2 * i], v[kCount > 1 ? 2 * i + 1 : 0]);
  if constexpr (kHalf > 1) return totals<kLeft, kHalf / 2>(v);
  return v[0];
}

// kLines rows of w from `o` on with kRows rows of x; kChains sums for each pair, so that none waits for the one before.
template <int kRows, int kLines, int kChains, class T>
inline void block(const float* x, const T* w, const float* bias, float* out, int64_t o, int64_t outputs, int64_t width) {
  V sums[kChains][kRows * kLines] = {};
  const T* line = w + o * width;
  int64_t i = 0;
  for (; i + kChains * kLanes <= width; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      const int64_t k = i + c * kLanes;
      for (int l = 0; l < kLines; ++l) {
        __builtin_prefetch(line + l * width + k + kAhead / sizeof(T));
        const V v = load(line + l * width + k);
        for (int r = 0; r < kRows; ++r) sums[c][r * kLines + l] += v * load(x + r * width + k);
      }
    }
  }
  for (; i < width; i += kLanes) {
    for (int l = 0; l < kLines; ++l) {
      const V v = load(line + l * width + i, width - i);
      for (int r = 0; r < kRows; ++r) sums[0][r * kLines + l] += v * load(x + r * width + i, width - i);
    }
  }
  for (int c = 1; c < kChains; ++c) {
    for (int n = 0; n < kRows * kLines; ++n) sums[0][n] += sums[c][n];
  }
  const V all = totals<kRows * kLines>(sums[0]);
  for (int r = 0; r < kRows; ++r) {
    for (int l = 0; l < kLines; ++l) out[r * outputs + o + l] = all[r * kLines + l] + (bias ? bias[o + l] : 0.0f);
  }
}

template <int kRows, int kLines, int kChains, class T>
void lines(const float* x, const T* w, const float* bias, float* out, int64_t start, int64_t stop, int64_t outputs,
           int64_t width) {
  int64_t o = start;
  for (; o + kLines <= stop; o += kLines) block<kRows, kLines, kChains>(x, w, bias, out, o, outputs, width);
  for (; o < stop; ++o) block<kRows, 1, 1>(x, w, bias, out, o, outputs, width);
}

// x [rows, width], w [outputs, width], bias [outputs] or null -> out [rows, outputs].
template <class T>
void linear(uintptr_t x_, uintptr_t w_, uintptr_t bias_, uintptr_t out_, int64_t rows, int64_t outputs, int64_t width,
            int threads) {
  const T* w = at<const T>(w_);
  const float* bias = at<const float>(bias_);
  const int64_t step = std::max<int64_t>(1, kRun / std::max<int64_t>(1, width));
  spread(outputs, step, threads, [=](int64_t start, int64_t stop) {
    const float* x = at<const float>(x_);
    float* out = at<float>(out_);
    int64_t left = rows;
    const auto next = [&](auto kernel, int64_t count) {
      kernel(x, w, bias, out, start, stop, outputs, width);
      x += count * width;
      out += count * outputs;
      left -= count;
    };
    while (left >= 8) next(lines<8, 1, 2, T>, 8);
    if (left >= 4) next(lines<4, 1, 4, T>, 4);
    if (left >= 2) next(lines<2, 1, 8, T>, 2);
    if (left) next(lines<1, 1, 8, T>, 1);
  });
}

}  // namespace

PYBIND11_MODULE(MODULE, m) {
  m.doc() = "Linear layers of a few rows; see megatron/kernels/cpu/few_rows.py.";
  m.attr("INTERFACE") = 2;  // raise it here and in few_rows.py when a function changes
  m.def("linear_float32", &linear<float>, py::call_guard<py::gil_scoped_release>());
  m.def("linear_bfloat16", &linear<Bf16>, py::call_guard<py::gil_scoped_release>());
  m.def("linear_float16", &linear<Fp16>, py::call_guard<py::gil_scoped_release>());
}
