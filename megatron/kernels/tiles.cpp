// Causal attention in bf16 on the matrix tiles of AMX, forward and backward; for megatron/kernels/tile_attention.py, which
// checks shapes and dtypes. One head after another: scores, probabilities and their gradients lie transposed, [keys,
// queries], so that what belongs to a query (its largest score, its sum) is a lane, and products need no other transpose
// than those of the inputs. Products take bf16 and add up in fp32; softmax is fp32. Nothing depends on the number of
// threads. No thread holds the GIL here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

namespace py = pybind11;

namespace {

constexpr int64_t kBlock = 32;  // queries or keys: two tiles
constexpr int64_t kChunk = 64;  // queries that backward takes at a time: their scores stay in the first cache
constexpr int64_t kPad = 16;    // between lines of transposed matrices, so that they do not meet in the cache

// Asks the system for tiles; false where there are none.
bool tiles_are_there() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// All eight tiles are 16 lines of 64 bytes. Not a local: compilers see no more than eight bytes of it read.
const TileConfig kTiles;

// out [m, n] (+)= a [m, k] b [k, n]: m, n, k multiples of 32. a is bf16, b pairs of lines of bf16 [k / 2, n] (what lies
// in one 32-bit word belongs to one column), out fp32. Widths are in elements of each: bf16, words, fp32.
void multiply(const Bf16* a, int64_t a_width, const uint32_t* b, int64_t b_width, float* out, int64_t out_width, int64_t m,
              int64_t n, int64_t k, bool add) {
  for (int64_t i = 0; i < m; i += 32) {
    for (int64_t j = 0; j < n; j += 32) {
      float* to = out + i * out_width + j;
      if (add) {
        _tile_loadd(0, to, 4 * out_width);
        _tile_loadd(1, to + 16, 4 * out_width);
        _tile_loadd(2, to + 16 * out_width, 4 * out_width);
        _tile_loadd(3, to + 16 * out_width + 16, 4 * out_width);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t l = 0; l < k; l += 32) {
        _tile_loadd(4, a + i * a_width + l, 2 * a_width);
        _tile_loadd(6, b + l / 2 * b_width + j, 4 * b_width);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + l / 2 * b_width + j + 16, 4 * b_width);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + (i + 16) * a_width + l, 2 * a_width);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, to, 4 * out_width);
      _tile_stored(1, to + 16, 4 * out_width);
      _tile_stored(2, to + 16 * out_width, 4 * out_width);
      _tile_stored(3, to + 16 * out_width + 16, 4 * out_width);
    }
  }
}

// ---- layouts

struct Steps {
  int64_t s, b, n;  // between positions, samples and heads, in numbers
};

// Lines of one head -> [rows, d], zero from s on.
void copy_lines(const Bf16* from, int64_t step, int64_t s, int64_t rows, int64_t d, Bf16* to) {
  for (int64_t i = 0; i < s; ++i) std::memcpy(to + i * d, from + i * step, d * sizeof(Bf16));
  std::memset(to + s * d, 0, (rows - s) * d * sizeof(Bf16));
}

// Words [lines, width] -> [width, lines + kPad].
void transpose(const uint32_t* from, int64_t lines, int64_t width, uint32_t* to) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(width)));
  for (int64_t i = 0; i < lines; i += 16) {
    for (int64_t j = 0; j < width; ++j) {
      _mm512_storeu_si512(to + j * (lines + kPad) + i, _mm512_i32gather_epi32(at, from + i * width + j, 4));
    }
  }
}

// bf16 [lines, d] -> words [lines / 2, d] of two lines each.
void pair_lines(const Bf16* from, int64_t lines, int64_t d, uint32_t* to) {
  for (int64_t i = 0; i < lines; i += 2) {
    for (int64_t j = 0; j < d; j += kLanes) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * d + j)));
      const __m512i high =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + (i + 1) * d + j)));
      _mm512_storeu_si512(to + i / 2 * d + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// fp32 [d, width] times `scale`, or times scales[column] -> s lines of bf16, `step` apart.
void write_transposed(const float* from, int64_t width, int64_t s, int64_t d, const float* scales, float scale, Bf16* to,
                      int64_t step) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(width)));
  for (int64_t i = 0; i < s; ++i) {
    const float by = scales == nullptr ? scale : scales[i];
    for (int64_t j = 0; j < d; j += kLanes) {
      store(to + i * step + j, same_bits<V>(_mm512_i32gather_ps(at, from + j * width + i, 4)) * by);
    }
  }
}

// 2^v for v <= 0 or little above: rounded to an integer and the Taylor series of the rest, off by a few millionths.
inline __m512 power_of_two(__m512 v) {
  const __m512 n = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT);
  const __m512 f = _mm512_sub_ps(v, n);
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(1.3333558e-3f), _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24022651f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69314718f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), n);
}

// Lanes of the queries from `query` on that see `key`.
inline __mmask16 seeing(int64_t key, int64_t query) {
  const int64_t hidden = key - query;
  return hidden <= 0 ? 0xffff : hidden >= kLanes ? 0 : static_cast<__mmask16>(0xffff << hidden);
}

// Two lines as words of pairs of bf16.
inline __m512i paired(__m512 low, __m512 high) {
  const __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
  const __m512i b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

inline void store_bf16(Bf16* to, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(v));
}

struct Shape {
  int64_t s, b, n, groups, d;
  float scale;  // of scores
  int64_t rows() const { return (s + kBlock - 1) / kBlock * kBlock; }
};

constexpr float kLog2E = 1.44269504f;

// ---- forward

struct ForwardScratch {
  std::vector<Bf16> keys, line;
  std::vector<uint32_t> words, queries, values, probs;
  std::vector<float> scores, out;
  explicit ForwardScratch(const Shape& x)
      : keys(x.rows() * x.d), line(x.rows() * x.d), words(x.rows() / 2 * x.d), queries(x.d / 2 * (x.rows() + kPad)),
        values(x.d * (x.rows() / 2 + kPad)), probs(x.rows() / 2 * kBlock), scores(x.rows() * kBlock), out(x.d * kBlock) {}
};

// Softmax over the lines of scores [keys, 32] of the queries from `query` on: pairs of lines of unnormalized probabilities,
// and of each query 1 / their sum and log2 of the sum of 2^(scale score).
void softmax(const float* scores, int64_t keys, int64_t query, float scale, uint32_t* probs, float* inverse,
             float* log_sum) {
  for (int64_t half = 0; half < kBlock; half += kLanes) {
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t key = 0; key < keys; ++key) {
      const __m512 score = _mm512_loadu_ps(scores + key * kBlock + half);
      largest = _mm512_mask_max_ps(largest, seeing(key, query + half), score, largest);
    }
    const __m512 by = _mm512_set1_ps(scale), least = _mm512_mul_ps(largest, by);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key += 2) {
      __m512 two[2];
      for (int64_t i = 0; i < 2; ++i) {
        const __m512 score = _mm512_loadu_ps(scores + (key + i) * kBlock + half);
        const __m512 p = power_of_two(_mm512_fmsub_ps(score, by, least));
        two[i] = _mm512_maskz_mov_ps(seeing(key + i, query + half), p);
        sum = _mm512_add_ps(sum, two[i]);
      }
      _mm512_storeu_si512(probs + key / 2 * kBlock + half, paired(two[0], two[1]));
    }
    float sums[kLanes], tops[kLanes];
    _mm512_storeu_ps(sums, sum);
    _mm512_storeu_ps(tops, least);
    for (int64_t i = 0; i < kLanes; ++i) {
      inverse[half + i] = 1.0f / sums[i];
      log_sum[half + i] = tops[i] + std::log2(sums[i]);
    }
  }
}

void forward_head(const Shape& x, ForwardScratch& to, const Bf16* q, int64_t step_q, Bf16* out, int64_t step_out,
                  float* log_sums) {
  const int64_t rows = x.rows();
  copy_lines(q, step_q, x.s, rows, x.d, to.line.data());
  transpose(reinterpret_cast<const uint32_t*>(to.line.data()), rows, x.d / 2, to.queries.data());
  for (int64_t start = 0; start < x.s; start += kBlock) {
    const int64_t keys = start + kBlock;
    float inverse[kBlock];
    multiply(to.keys.data(), x.d, to.queries.data() + start, rows + kPad, to.scores.data(), kBlock, keys, kBlock, x.d,
             false);
    softmax(to.scores.data(), keys, start, x.scale * kLog2E, to.probs.data(), inverse, log_sums + start);
    multiply(reinterpret_cast<const Bf16*>(to.values.data()), rows + 2 * kPad, to.probs.data(), kBlock, to.out.data(),
             kBlock, x.d, kBlock, keys, false);
    write_transposed(to.out.data(), kBlock, std::min(kBlock, x.s - start), x.d, inverse, 1.0f, out + start * step_out,
                     step_out);
  }
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// q [s, b, n, d], k and v [s, b, groups, d] with the given steps, out [s, b, n, d] contiguous; log_sums [b, n, rows] fp32.
void forward(std::array<uintptr_t, 5> addresses, std::array<std::array<int64_t, 3>, 3> steps, std::array<int64_t, 5> sizes,
             float scale, int threads) {
  const Shape x{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], scale};
  const int64_t heads = x.n / x.groups;
  const auto work = [&](int64_t unit, int64_t, ForwardScratch& scratch) {
    const int64_t sample = unit / x.groups, group = unit % x.groups;
    _tile_loadconfig(&kTiles);
    const auto head_of = [&](int which, int64_t head) {
      return at<const Bf16>(addresses[which]) + sample * steps[which][1] + head * steps[which][2];
    };
    copy_lines(head_of(1, group), steps[1][0], x.s, x.rows(), x.d, scratch.keys.data());
    copy_lines(head_of(2, group), steps[2][0], x.s, x.rows(), x.d, scratch.line.data());
    pair_lines(scratch.line.data(), x.rows(), x.d, scratch.words.data());
    transpose(scratch.words.data(), x.rows() / 2, x.d, scratch.values.data());
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      forward_head(x, scratch, head_of(0, head), steps[0][0], at<Bf16>(addresses[3]) + (sample * x.n + head) * x.d,
                   x.b * x.n * x.d, at<float>(addresses[4]) + (sample * x.n + head) * x.rows());
    }
    _tile_release();
  };
  spread_with(x.b * x.groups, 1, threads, [&] { return ForwardScratch(x); }, work);
}

// ---- backward

struct BackwardScratch {
  std::vector<Bf16> keys, values, line, probs, grads;
  std::vector<uint32_t> words, keys_across, queries, queries_across, above, above_across, pairs;
  std::vector<float> scores, grad_probs, grad_q, grad_k, grad_v, delta;
  explicit BackwardScratch(const Shape& x) {
    const int64_t rows = x.rows(), whole = rows * x.d;
    for (auto* lines : {&keys, &values, &line}) lines->resize(whole);
    for (auto* lines : {&probs, &grads}) lines->resize(kBlock * (kChunk + kPad));
    for (auto* lines : {&words, &queries, &above}) lines->resize(whole / 2);
    keys_across.resize(x.d * (rows / 2 + kPad));
    for (auto* lines : {&queries_across, &above_across}) lines->resize(x.d / 2 * (rows + kPad));
    pairs.resize(kBlock / 2 * (kChunk + kPad));
    for (auto* lines : {&scores, &grad_probs}) lines->resize(kBlock * (kChunk + kPad));
    grad_q.resize(x.d * (rows + kPad));
    for (auto* lines : {&grad_k, &grad_v}) lines->resize(whole);
    delta.resize(rows);
  }
};

// From transposed scores and gradients of probabilities of 32 keys from `key` on and so many queries from `start` on:
// probabilities and gradients of scores (before their scale) in bf16, the latter as pairs of lines, too.
void softmax_grad(const Shape& x, BackwardScratch& to, int64_t key, int64_t start, int64_t queries, const float* log_sums) {
  constexpr int64_t width = kChunk + kPad;
  const __m512 by = _mm512_set1_ps(x.scale * kLog2E);
  for (int64_t i = 0; i < kBlock; i += 2) {
    for (int64_t query = 0; query < queries; query += kLanes) {
      const __m512 log_sum = _mm512_loadu_ps(log_sums + start + query);
      const __m512 delta = _mm512_loadu_ps(to.delta.data() + start + query);
      __m512 two[2];
      for (int64_t j = 0; j < 2; ++j) {
        const int64_t at = (i + j) * width + query;
        const __mmask16 seen = seeing(key + i + j, start + query);
        const __m512 score = _mm512_loadu_ps(to.scores.data() + at);
        const __m512 p = _mm512_maskz_mov_ps(seen, power_of_two(_mm512_fmsub_ps(score, by, log_sum)));
        two[j] = _mm512_mul_ps(p, _mm512_sub_ps(_mm512_loadu_ps(to.grad_probs.data() + at), delta));
        store_bf16(to.probs.data() + at, p);
        store_bf16(to.grads.data() + at, two[j]);
      }
      _mm512_storeu_si512(to.pairs.data() + i / 2 * width + query, paired(two[0], two[1]));
    }
  }
}

// Of each query the sum of out times its gradient.
void deltas(const Shape& x, const Bf16* out, const Bf16* above, int64_t step, int64_t above_step, float* to) {
  for (int64_t i = 0; i < x.rows(); ++i) {
    to[i] = i >= x.s ? 0.0f : sum_over(x.d, [=](int64_t j) {
      return load(out + i * step + j) * load(above + i * above_step + j);
    });
  }
}

// What 32 keys and so many queries add to each other's gradients, and to those of the values.
void add_chunk(const Shape& x, BackwardScratch& to, int64_t key, int64_t start, int64_t queries, const float* log_sums) {
  constexpr int64_t width = kChunk + kPad;
  const int64_t d = x.d, across = x.rows() + kPad;
  multiply(to.keys.data() + key * d, d, to.queries_across.data() + start, across, to.scores.data(), width, kBlock, queries,
           d, false);
  multiply(to.values.data() + key * d, d, to.above_across.data() + start, across, to.grad_probs.data(), width, kBlock,
           queries, d, false);
  softmax_grad(x, to, key, start, queries, log_sums);
  multiply(to.probs.data(), width, to.above.data() + start / 2 * d, d, to.grad_v.data() + key * d, d, kBlock, d, queries,
           true);
  multiply(to.grads.data(), width, to.queries.data() + start / 2 * d, d, to.grad_k.data() + key * d, d, kBlock, d, queries,
           true);
  multiply(reinterpret_cast<const Bf16*>(to.keys_across.data()) + key, x.rows() + 2 * kPad, to.pairs.data(), width,
           to.grad_q.data() + start, across, d, queries, kBlock, true);
}

// Adds to the gradients of its group's key and value, and writes the query's.
void backward_head(const Shape& x, BackwardScratch& to, const Bf16* q, int64_t step_q, const float* log_sums, Bf16* grad_q,
                   int64_t step_grad) {
  const int64_t rows = x.rows(), width = rows + kPad, d = x.d;
  copy_lines(q, step_q, x.s, rows, d, to.line.data());
  transpose(reinterpret_cast<const uint32_t*>(to.line.data()), rows, d / 2, to.queries_across.data());
  pair_lines(to.line.data(), rows, d, to.queries.data());
  std::fill(to.grad_q.begin(), to.grad_q.end(), 0.0f);
  for (int64_t key = 0; key < x.s; key += kBlock) {
    for (int64_t start = key; start < rows; start += kChunk) {
      add_chunk(x, to, key, start, std::min(kChunk, rows - start), log_sums);
    }
  }
  write_transposed(to.grad_q.data(), width, x.s, d, nullptr, x.scale, grad_q, step_grad);
}

void write_lines(const std::vector<float>& from, const Shape& x, float scale, Bf16* to, int64_t step) {
  for (int64_t i = 0; i < x.s; ++i) {
    for (int64_t j = 0; j < x.d; j += kLanes) store(to + i * step + j, load(from.data() + i * x.d + j) * scale);
  }
}

// Inputs: q, k, v, the gradient above, out (contiguous), log_sums; then gradients of q, k and v. Steps of all but log_sums.
void backward(std::array<uintptr_t, 9> addresses, std::array<std::array<int64_t, 3>, 9> steps, std::array<int64_t, 5> sizes,
              float scale, int threads) {
  const Shape x{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], scale};
  const int64_t heads = x.n / x.groups;
  const auto work = [&](int64_t unit, int64_t, BackwardScratch& scratch) {
    const int64_t sample = unit / x.groups, group = unit % x.groups;
    _tile_loadconfig(&kTiles);
    const auto head_of = [&](int which, int64_t head) {
      return at<Bf16>(addresses[which]) + sample * steps[which][1] + head * steps[which][2];
    };
    copy_lines(head_of(1, group), steps[1][0], x.s, x.rows(), x.d, scratch.keys.data());
    copy_lines(head_of(2, group), steps[2][0], x.s, x.rows(), x.d, scratch.values.data());
    pair_lines(scratch.keys.data(), x.rows(), x.d, scratch.words.data());
    transpose(scratch.words.data(), x.rows() / 2, x.d, scratch.keys_across.data());
    std::fill(scratch.grad_k.begin(), scratch.grad_k.end(), 0.0f);
    std::fill(scratch.grad_v.begin(), scratch.grad_v.end(), 0.0f);
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      const Bf16* above = head_of(3, head);
      deltas(x, head_of(4, head), above, steps[4][0], steps[3][0], scratch.delta.data());
      copy_lines(above, steps[3][0], x.s, x.rows(), x.d, scratch.line.data());
      transpose(reinterpret_cast<const uint32_t*>(scratch.line.data()), x.rows(), x.d / 2, scratch.above_across.data());
      pair_lines(scratch.line.data(), x.rows(), x.d, scratch.above.data());
      backward_head(x, scratch, head_of(0, head), steps[0][0],
                    at<const float>(addresses[5]) + (sample * x.n + head) * x.rows(), head_of(6, head), steps[6][0]);
    }
    write_lines(scratch.grad_k, x, x.scale, head_of(7, group), steps[7][0]);
    write_lines(scratch.grad_v, x, 1.0f, head_of(8, group), steps[8][0]);
    _tile_release();
  };
  spread_with(x.b * x.groups, 1, threads, [&] { return BackwardScratch(x); }, work);
}

}  // namespace

PYBIND11_MODULE(tiles_cpp, m) {
  m.doc() = "Attention on AMX; see megatron/kernels/tile_attention.py.";
  m.attr("INTERFACE") = 1;  // raise it here and in tile_attention.py when a function changes
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("tiles_are_there", &tiles_are_there);
  m.def("forward", &forward, unlocked);
  m.def("backward", &backward, unlocked);
}
