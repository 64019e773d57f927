// Activations, RMSNorm, rotary positions, sums, the loss and dropout in one pass over memory; for
// megatron/kernels/cpu/native.py, which gives addresses of contiguous bf16 or fp32 numbers and checks shapes. The maths is
// fp32, rounded once. Work is cut into blocks that do not depend on the number of threads, and sums over blocks are taken
// in their order. Built once for each level of x86-64 (setup.py). No thread holds the GIL here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "vectors.h"

namespace py = pybind11;

namespace {

constexpr int64_t kRun = 1 << 15;  // numbers of one block of a flat tensor
constexpr int64_t kRows = 32;      // of one block whose sums of columns are taken
constexpr int64_t kRow = 1024;     // squares that are added in fp32

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// ---- activations

constexpr float kLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi): tanh GELU is x sigmoid(kLinear x + kCubic x^3)
constexpr float kCubic = 0.044715f * kLinear;
constexpr float kEnd = 10.0f;  // beyond it tanh GELU is x or, to fp32, 0; the sigmoid there is of 87.3

template <class T>
void gelu(uintptr_t x_, uintptr_t out_, int64_t size, int threads) {
  const T* x = at<const T>(x_);
  T* out = at<T>(out_);
  spread(size, kRun, threads, [=](int64_t start, int64_t stop) {
    each_register(stop - start, [=](int64_t at, auto count) {
      const int64_t i = start + at;
      const V v = load(x + i, count), c = clamp(v, kEnd);
      store(out + i, where_less(v, V{} - kEnd, c, v) * sigmoid(c * (kLinear + kCubic * c * c)), count);
    });
  });
}

// GELU's derivative at c (clamped to kEnd), s the sigmoid there.
inline V gelu_slope(V c, V s) { return s + s * (1.0f - s) * c * (kLinear + 3.0f * kCubic * c * c); }

// GELU in fp32 and its derivative, for a backward that multiplies.
void gelu_with_slope(uintptr_t x_, uintptr_t out_, uintptr_t slope_, int64_t size, int threads) {
  const float* x = at<const float>(x_);
  float *out = at<float>(out_), *slope = at<float>(slope_);
  spread(size, kRun, threads, [=](int64_t start, int64_t stop) {
    each_register(stop - start, [=](int64_t at, auto count) {
      const int64_t i = start + at;
      const V v = load(x + i, count), c = clamp(v, kEnd);
      const V s = sigmoid(c * (kLinear + kCubic * c * c));
      store(out + i, where_less(v, V{} - kEnd, c, v) * s, count);
      store(slope + i, gelu_slope(c, s), count);
    });
  });
}

template <class T>
void gelu_grad(uintptr_t x_, uintptr_t above, uintptr_t grad_, int64_t size, int threads) {
  const T *x = at<const T>(x_), *grad_out = at<const T>(above);
  T* grad = at<T>(grad_);
  spread(size, kRun, threads, [=](int64_t start, int64_t stop) {
    each_register(stop - start, [=](int64_t at, auto count) {
      const int64_t i = start + at;
      const V c = clamp(load(x + i, count), kEnd);
      const V slope = gelu_slope(c, sigmoid(c * (kLinear + kCubic * c * c)));
      store(grad + i, slope * load(grad_out + i, count), count);
    });
  });
}

template <class T>
void swiglu(uintptr_t x, uintptr_t out_, int64_t rows, int64_t width, int threads) {
  const T* gate_up = at<const T>(x);
  T* out = at<T>(out_);
  spread(rows, std::max<int64_t>(1, kRun / (2 * width + 1)), threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      const T *gate = gate_up + 2 * row * width, *up = gate + width;
      each_register(width, [=](int64_t i, auto count) {
        const V v = load(gate + i, count), c = clamp(v, kFar), g = where_less(v, V{} - kFar, c, v);
        store(out + row * width + i, g * sigmoid(c) * load(up + i, count), count);
      });
    }
  });
}

template <class T>
void swiglu_grad(uintptr_t x, uintptr_t above, uintptr_t grad_, int64_t rows, int64_t width, int threads) {
  const T *gate_up = at<const T>(x), *grad_out = at<const T>(above);
  T* grad = at<T>(grad_);
  spread(rows, std::max<int64_t>(1, kRun / (2 * width + 1)), threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      const T *gate = gate_up + 2 * row * width, *up = gate + width;
      T* to = grad + 2 * row * width;
      each_register(width, [=](int64_t i, auto count) {
        const V v = load(gate + i, count), c = clamp(v, kFar), g = where_less(v, V{} - kFar, c, v);
        const V d = load(grad_out + row * width + i, count), s = sigmoid(c);
        store(to + i, d * load(up + i, count) * s * (1.0f + c * (1.0f - s)), count);
        store(to + width + i, d * g * s, count);
      });
    }
  });
}

// ---- RMSNorm

// 1 / sqrt(mean square + eps).
template <class T>
float inverse_rms(const T* x, int64_t width, float eps) {
  const float squares = sum_over(width, [=](int64_t i, auto count) {
    const V v = load(x + i, count);
    return v * v;
  });
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

template <class T>
void rms_norm(uintptr_t x_, uintptr_t weight_, uintptr_t out_, int64_t rows, int64_t width, float eps, int threads) {
  const T* x = at<const T>(x_);
  const float* weight = at<const float>(weight_);
  T* out = at<T>(out_);
  spread(rows, kRows, threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      const T* from = x + row * width;
      const float inverse = inverse_rms(from, width, eps);
      each_register(width, [=](int64_t i, auto count) {
        store(out + row * width + i, load(from + i, count) * inverse * load(weight + i, count), count);
      });
    }
  });
}

template <class Count>
inline void add_to(float* sums, V values, Count count) {
  store(sums, load(sums, count) + values, count);
}

// Adds up blocks [blocks, width] in their order, and the sum to `out`.
void add_blocks(const std::vector<float>& parts, int64_t width, float* out) {
  each_register(width, [&](int64_t i, auto count) {
    V sum = {};
    for (size_t start = 0; start < parts.size(); start += width) sum += load(parts.data() + start + i, count);
    add_to(out + i, sum, count);
  });
}

// Up to kLanes x kLanes numbers: rows [rows, columns] at x, `step` apart, become columns at out, whose rows are `out_step`
// apart, or are added to them.
template <bool add>
inline void transpose_tile(const float* x, int64_t step, float* out, int64_t out_step, int64_t rows, int64_t columns) {
  if (rows >= kLanes && columns >= kLanes) {
    V v[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) v[i] = load(x + i * step);
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(out + i * out_step, add ? load(out + i * out_step) + v[i] : v[i]);
    return;
  }
  for (int64_t j = 0; j < std::min(columns, kLanes); ++j) {
    for (int64_t i = 0; i < std::min(rows, kLanes); ++i) {
      float& to = out[j * out_step + i];
      to = add ? to + x[i * step + j] : x[i * step + j];
    }
  }
}

// With y = x inverse the gradient of x is (g w - y mean(g w y)) inverse; to grad_weight [width] the sum over rows is added.
template <class T>
void rms_norm_grad(uintptr_t x_, uintptr_t weight_, uintptr_t grad_out_, uintptr_t grad_, uintptr_t grad_weight, int64_t rows,
                   int64_t width, float eps, int threads) {
  const T *x = at<const T>(x_), *grad_out = at<const T>(grad_out_);
  const float* weight = at<const float>(weight_);
  T* grad = at<T>(grad_);
  std::vector<float> weights((rows + kRows - 1) / kRows * width);
  spread(rows, kRows, threads, [&](int64_t start, int64_t stop) {
    float* to_weight = weights.data() + start / kRows * width;
    for (int64_t row = start; row < stop; ++row) {
      const T *from = x + row * width, *above = grad_out + row * width;
      const float inverse = inverse_rms(from, width, eps);
      V sums = {};
      each_register(width, [&](int64_t i, auto count) {
        const V y = load(from + i, count) * inverse, g = load(above + i, count);
        add_to(to_weight + i, g * y, count);
        sums += g * load(weight + i, count) * y;
      });
      const float along = total(sums) / static_cast<float>(width);
      each_register(width, [=](int64_t i, auto count) {
        const V y = load(from + i, count) * inverse, g = load(above + i, count);
        store(grad + row * width + i, (g * load(weight + i, count) - y * along) * inverse, count);
      });
    }
  });
  add_blocks(weights, width, at<float>(grad_weight));
}

// Sums of kCount registers' columns over the rows of x, whose rows are `step` apart -> to.
template <int kCount, class T>
inline void sum_columns(const T* x, int64_t step, int64_t rows, float* to) {
  V sums[kCount] = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int c = 0; c < kCount; ++c) sums[c] += load(x + row * step + c * kLanes);
  }
  for (int c = 0; c < kCount; ++c) store(to + c * kLanes, sums[c]);
}

// Added to out [width].
template <class T>
void column_sums(uintptr_t x_, uintptr_t out, int64_t rows, int64_t width, int threads) {
  constexpr int kCount = 4;
  const T* x = at<const T>(x_);
  std::vector<float> sums((rows + kRows - 1) / kRows * width);
  spread(rows, kRows, threads, [&](int64_t start, int64_t stop) {
    const T* from = x + start * width;
    float* to = sums.data() + start / kRows * width;
    int64_t i = 0;
    for (; i + kCount * kLanes <= width; i += kCount * kLanes) {
      sum_columns<kCount>(from + i, width, stop - start, to + i);
    }
    for (int64_t row = 0; row < stop - start; ++row) {
      each_register(width - i, [=](int64_t rest, auto count) {
        add_to(to + i + rest, load(from + row * width + i + rest, count), count);
      });
    }
  });
  add_blocks(sums, width, at<float>(out));
}

// total += x.
template <class T>
void add(uintptr_t x_, uintptr_t total_, int64_t size, int threads) {
  const T* x = at<const T>(x_);
  float* total = at<float>(total_);
  spread(size, kRun, threads, [=](int64_t start, int64_t stop) {
    each_register(stop - start, [=](int64_t i, auto count) {
      add_to(total + start + i, load(x + start + i, count), count);
    });
  });
}

// x [rows, width] of fp32 as [width, rows], or added to such a matrix.
template <bool add>
void transpose_all(const float* x, float* out, int64_t rows, int64_t width, int threads) {
  spread(rows, kRows, threads, [=](int64_t start, int64_t stop) {
    for (int64_t i = 0; i < width; i += kLanes) {
      for (int64_t row = start; row < stop; row += kLanes) {
        transpose_tile<add>(x + row * width + i, width, out + i * rows + row, rows, stop - row, width - i);
      }
    }
  });
}

void transposed(uintptr_t x, uintptr_t out, int64_t rows, int64_t width, int threads) {
  transpose_all<false>(at<const float>(x), at<float>(out), rows, width, threads);
}

void add_transposed(uintptr_t x, uintptr_t total, int64_t rows, int64_t width, int threads) {
  transpose_all<true>(at<const float>(x), at<float>(total), rows, width, threads);
}

// ---- sums of squares

// Of several contiguous tensors (address, size): the sum of all squares. Squares are added in fp32 for kRow numbers at a
// time, these sums in fp64, for each tensor first.
template <class T>
double sum_of_squares(const std::vector<std::array<uint64_t, 2>>& tensors, int threads) {
  struct Run {
    size_t tensor;
    const T* from;
    int64_t size;
  };
  std::vector<Run> runs;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const auto [address, size] = tensors[tensor];
    for (uint64_t start = 0; start < size; start += kRun) {
      const int64_t count = static_cast<int64_t>(std::min<uint64_t>(kRun, size - start));
      runs.push_back({tensor, at<const T>(address) + start, count});
    }
  }
  std::vector<double> sums(runs.size());
  spread(static_cast<int64_t>(runs.size()), 1, threads, [&](int64_t run, int64_t) {
    const auto [tensor, from, size] = runs[run];
    for (int64_t start = 0; start < size; start += kRow) {
      sums[run] += sum_over(std::min(kRow, size - start), [&](int64_t i, auto count) {
        const V v = load(from + start + i, count);
        return v * v;
      });
    }
  });
  std::vector<double> of_tensor(tensors.size());
  for (size_t run = 0; run < runs.size(); ++run) of_tensor[runs[run].tensor] += sums[run];
  return std::accumulate(of_tensor.begin(), of_tensor.end(), 0.0);
}

// ---- rotary positions

// x [s, b, n, d] with the given steps between s, b and n -> out, contiguous. The tables are [s, half], or [s, b, half] if
// `each`; pairs are (i, i + half), numbers from 2 half on pass through. sign -1 turns back.
template <class T>
void rotate(uintptr_t x_, int64_t step_s, int64_t step_b, int64_t step_n, uintptr_t out_, uintptr_t cos_, uintptr_t sin_,
            int64_t s, int64_t b, int64_t n, int64_t d, int64_t half, bool each, float sign, int threads) {
  const T* x = at<const T>(x_);
  const float *cos = at<const float>(cos_), *sin = at<const float>(sin_);
  T* out = at<T>(out_);
  spread(s, std::max<int64_t>(1, kRun / (b * n * d + 1)), threads, [=](int64_t start, int64_t stop) {
    for (int64_t at = start * b * n; at < stop * b * n; ++at) {
      const int64_t head = at % n, sample = at / n % b, position = at / n / b;
      const T* from = x + position * step_s + sample * step_b + head * step_n;
      const float *c = cos + (each ? position * b + sample : position) * half, *t = sin + (c - cos);
      T* to = out + at * d;
      each_register(half, [=](int64_t i, auto count) {
        const V u = load(from + i, count), v = load(from + half + i, count);
        const V cosine = load(c + i, count), sine = load(t + i, count) * sign;
        store(to + i, u * cosine - v * sine, count);
        store(to + half + i, v * cosine + u * sine, count);
      });
      std::memcpy(to + 2 * half, from + 2 * half, (d - 2 * half) * sizeof(T));
    }
  });
}

// ---- loss

// Of each row of logits [rows, width], its first `valid` numbers: the largest, the logarithm of the sum of exponentials of
// what they are above the largest, and their sum.
template <class T>
void log_sums(uintptr_t x_, uintptr_t out, int64_t rows, int64_t width, int64_t valid, int threads) {
  const T* x = at<const T>(x_);
  float *tops = at<float>(out), *logs = tops + rows, *sums = logs + rows;
  spread(rows, std::max<int64_t>(1, kRun / (width + 1)), threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      const T* from = x + row * width;
      V largest = V{} - std::numeric_limits<float>::infinity();
      const int64_t whole = valid / kLanes * kLanes;
      for (int64_t i = 0; i < whole; i += kLanes) largest = larger(largest, load(from + i));
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < kLanes; ++i) top = std::max(top, largest[i]);
      for (int64_t i = whole; i < valid; ++i) top = std::max(top, load(from + i, 1)[0]);
      const float of_exp = sum_over(valid, [=](int64_t i, auto count) {
        return first(exp_of(clamp(load(from + i, count) - top, kFar)), count);
      });
      logs[row] = std::log(of_exp);
      tops[row] = top;
      sums[row] = sum_over(valid, [=](int64_t i, auto count) { return load(from + i, count); });
    }
  });
}

// Puts (exp(x - top - log) - uniform) * grad, less `hit` in one column of each row, in the place of logits [rows, width];
// columns from `valid` on become 0.
template <class T>
void loss_grad(uintptr_t x_, uintptr_t tops_, uintptr_t logs_, uintptr_t grads_, uintptr_t hits, uintptr_t columns,
               int64_t rows, int64_t width, int64_t valid, float uniform, int threads) {
  T* x = at<T>(x_);
  const float *tops = at<const float>(tops_), *logs = at<const float>(logs_);
  const float *grads = at<const float>(grads_), *off = at<const float>(hits);
  const int64_t* column = at<const int64_t>(columns);
  spread(rows, std::max<int64_t>(1, kRun / (width + 1)), threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      T* line = x + row * width;
      const float top = tops[row], log = logs[row], grad = grads[row];
      const float hit = valid ? load(line + column[row], 1)[0] : 0.0f;
      each_register(valid, [=](int64_t i, auto count) {
        const V p = exp_of(clamp(load(line + i, count) - top - log, kFar));
        store(line + i, (p - uniform) * grad, count);
      });
      if (valid) {
        const V p = exp_of(clamp(V{} + hit - top - log, kFar));
        store(line + column[row], (p - uniform) * grad - off[row], 1);
      }
      std::memset(static_cast<void*>(line + valid), 0, (width - valid) * sizeof(T));
    }
  });
}

// ---- dropout

// x times `factor` where the random bits (signed) are at most `most`, else times 0.
template <class T>
void drop(uintptr_t x_, uintptr_t bits_, uintptr_t out_, int64_t size, int32_t most, float factor, int threads) {
  typedef int16_t Bits __attribute__((vector_size(2 * kLanes)));
  const T* x = at<const T>(x_);
  const int16_t* bits = at<const int16_t>(bits_);
  T* out = at<T>(out_);
  const I kept_factor = same_bits<I>(V{} + factor);
  spread(size, 2 * kRun, threads, [=](int64_t start, int64_t stop) {
    each_register(stop - start, [=](int64_t at, auto count) {
      const int64_t i = start + at;
      Bits some = {};
      std::memcpy(&some, bits + i, count * sizeof(int16_t));
      const I kept = (__builtin_convertvector(some, I) - (most + 1)) >> 31;  // all ones or 0
      store(out + i, load(x + i, count) * same_bits<V>(kept & kept_factor), count);
    });
  });
}

template <class T>
void define(py::module_& m, const std::string& format) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def(("gelu_" + format).c_str(), &gelu<T>, unlocked);
  m.def(("gelu_grad_" + format).c_str(), &gelu_grad<T>, unlocked);
  m.def(("swiglu_" + format).c_str(), &swiglu<T>, unlocked);
  m.def(("swiglu_grad_" + format).c_str(), &swiglu_grad<T>, unlocked);
  m.def(("rms_norm_" + format).c_str(), &rms_norm<T>, unlocked);
  m.def(("rms_norm_grad_" + format).c_str(), &rms_norm_grad<T>, unlocked);
  m.def(("add_" + format).c_str(), &add<T>, unlocked);
  m.def(("column_sums_" + format).c_str(), &column_sums<T>, unlocked);
  m.def(("sum_of_squares_" + format).c_str(), &sum_of_squares<T>, unlocked);
  m.def(("rotate_" + format).c_str(), &rotate<T>, unlocked);
  m.def(("log_sums_" + format).c_str(), &log_sums<T>, unlocked);
  m.def(("loss_grad_" + format).c_str(), &loss_grad<T>, unlocked);
  m.def(("drop_" + format).c_str(), &drop<T>, unlocked);
}

}  // namespace

PYBIND11_MODULE(MODULE, m) {
  m.doc() = "One pass over rows; see megatron/kernels/cpu/native.py.";
  m.attr("INTERFACE") = 6;  // raise it here and in native.py when a function changes
  define<float>(m, "float32");
  define<Bf16>(m, "bfloat16");
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("gelu_with_slope_float32", &gelu_with_slope, unlocked);
  m.def("transposed_float32", &transposed, unlocked);
  m.def("add_transposed_float32", &add_transposed, unlocked);
}
