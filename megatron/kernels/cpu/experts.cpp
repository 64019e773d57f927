// What the experts of a mixture compute: GEMMs of consecutive rows of one tensor, each group of rows with its own matrix, in
// fp32, or in bf16 with fp32 sums where the processor has AVX512_BF16; SwiGLU times the router's probability; sums of the
// copies of a token. For megatron/kernels/cpu/experts.py, which checks shapes and dtypes. One thread computes one expert's
// GEMM, so that small ones need no synchronization, and gathers rows while it reads them. Every element is one chain of
// multiply-adds in the order of the inner dimension, whatever the number of threads. Built once for each level of x86-64
// (setup.py). No thread holds the GIL here.
//
// GEMMs read their factors by words of 32 bits: one number in fp32, two numbers that are neighbours in the inner dimension
// in bf16. "depth" counts words of the inner dimension. A word is never an operand of float arithmetic, only a place for bits.

#include <cpuid.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "vectors.h"

namespace py = pybind11;

namespace {

constexpr int kMostRows = kLanes == 16 ? 8 : 6;     // of a tile, whose sums stay in registers
constexpr int kMostColumns = kLanes == 16 ? 3 : 2;  // of a tile, in registers
constexpr int64_t kPanel = kMostColumns * kLanes;   // columns of a result that are computed together
constexpr int64_t kDepth = 512;                     // words at a time: the panel stays in the second cache
constexpr int64_t kRows = 256;                      // rows of a group that one thread takes at a time
constexpr int64_t kSwigluRows = 32;                 // the same of SwiGLU

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The first `count` numbers of C registers.
template <int C>
void load_part(const float* from, int64_t count, V (&to)[C]) {
  float part[C * kLanes] = {};
  std::memcpy(part, from, count * sizeof(float));
  for (int j = 0; j < C; ++j) to[j] = load(part + j * kLanes);
}

template <int C>
void store_part(float* to, int64_t count, const V (&from)[C]) {
  float part[C * kLanes];
  for (int j = 0; j < C; ++j) store(part + j * kLanes, from[j]);
  std::memcpy(to, part, count * sizeof(float));
}

// The kinds of numbers that GEMMs read: how many there are in a word, and sums += a b for a word `a` and a register of words.
struct Single {
  typedef float Number;
  static constexpr int64_t kNumbers = 1;
  static inline V add(V sum, float a, V b) { return sum + a * b; }
};

struct Pair {
  typedef Bf16 Number;
  static constexpr int64_t kNumbers = 2;
  static inline V add(V sum, float a, V b) {
#ifdef __AVX512F__
    // by its name, for the level of x86-64 that this is built for does not have it
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(_mm512_set1_ps(a)));
#endif
    return sum;
  }
};

// Whether this processor has the instruction of Pair, but not AMX, with which oneDNN multiplies faster.
bool multiplies_bf16() {
#ifdef __AVX512F__
  constexpr unsigned kAvx512Bf16 = 1u << 5, kAmxBf16 = 1u << 22;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || edx & kAmxBf16) return false;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & kAvx512Bf16;
#else
  return false;
#endif
}

// A matrix whose word (i, l) is at i * row + l * column.
struct Matrix {
  const float* at;
  int64_t row, column;
};

// The first `columns` of out [R, C registers] (+)= a [R, k] panel [k, C registers].
template <class Kind, int R, int C>
void tile(Matrix a, const float* panel, float* out, int64_t out_width, int64_t k, int64_t columns, bool add) {
  V sums[R][C] = {};
  const bool whole = columns == C * kLanes;
  for (int i = 0; i < R && add; ++i) {
    if (whole) {
      for (int j = 0; j < C; ++j) sums[i][j] = load(out + i * out_width + j * kLanes);
    } else {
      load_part(out + i * out_width, columns, sums[i]);
    }
  }
  for (int64_t l = 0; l < k; ++l) {
    V b[C];
    for (int j = 0; j < C; ++j) b[j] = load(panel + l * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      float word;
      std::memcpy(&word, a.at + i * a.row + l * a.column, sizeof(word));
#pragma GCC unroll 3
      for (int j = 0; j < C; ++j) sums[i][j] = Kind::add(sums[i][j], word, b[j]);
    }
  }
  for (int i = 0; i < R; ++i) {
    if (whole) {
      for (int j = 0; j < C; ++j) store(out + i * out_width + j * kLanes, sums[i][j]);
    } else {
      store_part(out + i * out_width, columns, sums[i]);
    }
  }
}

template <class Kind, int C>
void tile_of(int64_t rows, Matrix a, const float* panel, float* out, int64_t out_width, int64_t k, int64_t columns, bool add) {
  static_assert(kMostRows <= 8);
  switch (rows) {
    case 1: return tile<Kind, 1, C>(a, panel, out, out_width, k, columns, add);
    case 2: return tile<Kind, 2, C>(a, panel, out, out_width, k, columns, add);
    case 3: return tile<Kind, 3, C>(a, panel, out, out_width, k, columns, add);
    case 4: return tile<Kind, 4, C>(a, panel, out, out_width, k, columns, add);
    case 5: return tile<Kind, 5, C>(a, panel, out, out_width, k, columns, add);
    case 6: return tile<Kind, 6, C>(a, panel, out, out_width, k, columns, add);
    case 7: return tile<Kind, 7, C>(a, panel, out, out_width, k, columns, add);
    default: return tile<Kind, 8, C>(a, panel, out, out_width, k, columns, add);
  }
}

// Part of a matrix that is read next: brought into the second cache a share at a time, while something else is computed.
class Ahead {
 public:
  Ahead(const float* at, int64_t width, int64_t rows, int64_t columns)
      : at_(at), width_(width), rows_(rows), lines_((columns + kLine - 1) / kLine), left_(rows * lines_) {}

  int64_t lines() const { return rows_ * lines_; }

  void fetch(int64_t count) {
    for (count = std::min(count, left_), left_ -= count; count > 0; --count) {
      __builtin_prefetch(at_ + line_ * kLine, 0, 2);
      if (++line_ == lines_) line_ = 0, at_ += width_;
    }
  }

 private:
  static constexpr int64_t kLine = 16;
  const float* at_;
  int64_t width_, rows_, lines_, left_, line_ = 0;
};

// out [m, columns] (+)= a [m, k] panel [k, kPanel], of which the first `columns` count.
template <class Kind>
void multiply(Matrix a, const float* panel, float* out, int64_t out_width, int64_t m, int64_t k, int64_t columns, bool add,
              Ahead ahead) {
  const int64_t share = ahead.lines() / ((m + kMostRows - 1) / kMostRows) + 1;
  for (int64_t i = 0; i < m; i += kMostRows) {
    ahead.fetch(share);
    for (int64_t next = i + kMostRows; next < std::min(m, i + 2 * kMostRows); ++next) {
      for (int64_t j = 0; j < columns; j += 16) __builtin_prefetch(out + next * out_width + j, 1);
      __builtin_prefetch(out + next * out_width + columns - 1, 1);
    }
    const int64_t rows = std::min<int64_t>(kMostRows, m - i);
    const Matrix part{a.at + i * a.row, a.row, a.column};
    float* to = out + i * out_width;
    if (columns <= kLanes) {
      tile_of<Kind, 1>(rows, part, panel, to, out_width, k, columns, add);
    } else if (columns <= 2 * kLanes) {
      tile_of<Kind, 2>(rows, part, panel, to, out_width, k, columns, add);
    } else {
      tile_of<Kind, kMostColumns>(rows, part, panel, to, out_width, k, columns, add);
    }
  }
}

// Rows of a matrix, `width` words each, of which row i is row numbers[i] of memory, or, without numbers, row i itself.
struct Rows {
  const float* at;
  int64_t width;
  const int64_t* numbers;
  const float* operator[](int64_t i) const { return at + (numbers ? numbers[i] : i) * width; }
};

// Columns [column, column + columns) of `count` rows from `first` on -> [count, kPanel], zero from `columns` on.
void pack(const Rows& rows, int64_t first, int64_t count, int64_t column, int64_t columns, float* to) {
  for (int64_t i = 0; i < count; ++i, to += kPanel) {
    const float* from = rows[first + i] + column;
    if (i + 4 < count) __builtin_prefetch(rows[first + i + 4] + column);
    for (int64_t j = 0; j < columns; j += kLanes) store(to + j, load(from + j, columns - j), std::min(kLanes, kPanel - j));
    for (int64_t j = (columns + kLanes - 1) / kLanes * kLanes; j < kPanel; j += kLanes) store(to + j, V{}, kPanel - j);
  }
}

// Columns [column, column + columns) of `count` rows of bf16 from `first` on -> words [count / 2, width] of two rows each, the
// last with 0 where `count` is odd. Words from `columns` up to the next multiple of kLanes, or the width, become 0.
void pack_pairs(const Rows& rows, int64_t first, int64_t count, int64_t column, int64_t columns, float* to, int64_t width) {
  static const H kZeros = {};
  const auto read = [](const Bf16* from, int64_t left) {
    H part = {};
    std::memcpy(&part, from, std::min(kLanes, left) * sizeof(Bf16));
    return __builtin_convertvector(part, U);
  };
  for (int64_t i = 0; i < count; i += 2, to += width) {
    const Bf16* low = reinterpret_cast<const Bf16*>(rows[first + i]) + column;
    const Bf16* high = i + 1 < count ? reinterpret_cast<const Bf16*>(rows[first + i + 1]) + column : nullptr;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const U upper = high ? read(high + j, columns - j) : __builtin_convertvector(kZeros, U);
      store(to + j, same_bits<V>(read(low + j, columns - j) | upper << 16), std::min(kLanes, width - j));
    }
    for (int64_t j = (columns + kLanes - 1) / kLanes * kLanes; j < width; j += kLanes) {
      store(to + j, V{}, std::min(kLanes, width - j));
    }
  }
}

// `columns` rows of a matrix of this width, of each `count` numbers -> [count, kPanel], zero from `columns` on.
void pack_transposed(const float* from, int64_t width, int64_t columns, int64_t count, float* to) {
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    for (int64_t i = 0; i < count; i += kLanes) {
      V v[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) v[l] = j + l < columns ? load(from + (j + l) * width + i, count - i) : V{};
      transpose(v);
      for (int64_t l = 0; l < std::min(kLanes, count - i); ++l) store(to + (i + l) * kPanel + j, v[l]);
    }
  }
}

// What a thread needs: a panel, rows that it gathers, and sums that are rounded later.
struct Scratch {
  std::unique_ptr<float[]> panel{new float[kDepth * kPanel]};
  std::vector<float> gathered, sums;
};

// Rows [first, first + count) next to each other: where they are, or gathered.
const float* gather(const Rows& rows, int64_t first, int64_t count, std::vector<float>& to) {
  if (!rows.numbers) return rows[first];
  to.resize(std::max<size_t>(to.size(), count * rows.width));
  for (int64_t i = 0; i < count; ++i) std::memcpy(to.data() + i * rows.width, rows[first + i], rows.width * sizeof(float));
  return to.data();
}

struct Run {
  int64_t group, first, count;  // of rows
};

// Runs of at most `most` rows of each group.
std::vector<Run> runs_of(const std::vector<int64_t>& counts, int64_t most) {
  std::vector<Run> runs;
  int64_t first = 0;
  for (int64_t group = 0; group < static_cast<int64_t>(counts.size()); ++group) {
    for (int64_t i = 0; i < counts[group]; i += most) runs.push_back({group, first + i, std::min(most, counts[group] - i)});
    first += counts[group];
  }
  return runs;
}

// Columns [column, column + columns), and words [start, start + depth) of the inner dimension, of a group's matrix, [outputs,
// inputs] if transposed or [inputs, outputs] (`inputs` and `outputs` in numbers) -> panel [depth, kPanel].
template <class Kind>
void pack_weight(const float* weight, bool transposed, int64_t inputs, int64_t outputs, int64_t start, int64_t depth,
                 int64_t column, int64_t columns, float* panel) {
  constexpr int64_t n = Kind::kNumbers;
  if (transposed) {
    pack_transposed(weight + column * (inputs / n) + start, inputs / n, columns, depth, panel);
  } else if (n == 1) {
    pack({weight, outputs, nullptr}, start, depth, column, columns, panel);
  } else {
    pack_pairs({weight, outputs / n, nullptr}, n * start, n * depth, column, columns, panel, kPanel);
  }
}

// out [n, outputs]: rows of each group times the group's matrix w, [outputs, inputs] transposed or [inputs, outputs]. In bf16
// `inputs` and `outputs` are even.
template <class Kind>
void product(uintptr_t x, uintptr_t numbers, uintptr_t w, uintptr_t out_, const std::vector<int64_t>& counts, int64_t inputs,
             int64_t outputs, bool transposed, int threads) {
  typedef typename Kind::Number Number;
  const int64_t words = inputs / Kind::kNumbers, size = inputs * outputs / Kind::kNumbers;
  const Rows rows{at<const float>(x), words, numbers ? at<const int64_t>(numbers) : nullptr};
  const float* weights = at<const float>(w);
  Number* out = at<Number>(out_);
  const std::vector<Run> runs = runs_of(counts, kRows);
  spread_with(runs.size(), 1, threads, [] { return Scratch(); }, [&](int64_t index, int64_t, Scratch& scratch) {
    const Run run = runs[index];
    const float* a = gather(rows, run.first, run.count, scratch.gathered);
    const float* weight = weights + run.group * size;
    const auto next_part = [&](int64_t column, int64_t start) {
      if ((start += kDepth) >= words) start = 0, column += kPanel;
      const float* from = weight;
      if (column >= outputs) {
        if (index + 1 == static_cast<int64_t>(runs.size())) return Ahead(weight, 0, 0, 0);
        column = 0;
        from = weights + runs[index + 1].group * size;
      }
      const int64_t columns = std::min(kPanel, outputs - column), depth = std::min(kDepth, words - start);
      return transposed ? Ahead(from + column * words + start, words, columns, depth)
                        : Ahead(from + (start * outputs + column / Kind::kNumbers), outputs / Kind::kNumbers,
                                depth * Kind::kNumbers, columns / Kind::kNumbers);
    };
    for (int64_t column = 0; column < outputs; column += kPanel) {
      const int64_t columns = std::min(kPanel, outputs - column);
      Number* to = out + run.first * outputs + column;
      float* sums;
      int64_t width = outputs;
      if constexpr (Kind::kNumbers == 1) {
        sums = to;
      } else {
        scratch.sums.resize(kRows * kPanel);
        sums = scratch.sums.data();
        width = kPanel;
      }
      for (int64_t start = 0; start < words; start += kDepth) {
        const int64_t depth = std::min(kDepth, words - start);
        pack_weight<Kind>(weight, transposed, inputs, outputs, start, depth, column, columns, scratch.panel.get());
        multiply<Kind>({a + start, words, 1}, scratch.panel.get(), sums, width, run.count, depth, columns, start > 0,
                       next_part(column, start));
      }
      if constexpr (Kind::kNumbers > 1) {
        for (int64_t i = 0; i < run.count; ++i) {
          for (int64_t j = 0; j < columns; j += kLanes) {
            store(to + i * outputs + j, load(sums + i * width + j), columns - j);
          }
        }
      }
    }
  });
}

// out [groups, outputs, inputs], fp32, (+)= the transposed rows of grad [n, outputs] of each group times its rows of x [n,
// inputs]. Either's rows may be gathered. Without `add` a group without rows becomes 0.
template <class Kind>
void weight_grad(uintptr_t grad_, uintptr_t grad_numbers, uintptr_t x, uintptr_t numbers, uintptr_t out_,
                 const std::vector<int64_t>& counts, int64_t inputs, int64_t outputs, bool add, int threads) {
  constexpr int64_t n = Kind::kNumbers, kMost = kDepth * n;  // rows at a time
  const Rows rows{at<const float>(x), inputs / n, numbers ? at<const int64_t>(numbers) : nullptr};
  const Rows grads{at<const float>(grad_), outputs / n, grad_numbers ? at<const int64_t>(grad_numbers) : nullptr};
  float* totals = at<float>(out_);
  std::vector<int64_t> firsts(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) firsts[i + 1] = firsts[i] + counts[i];
  // With few groups each is shared out by panels of inputs.
  const int64_t groups = counts.size(), parts = groups >= 16 ? 1 : (inputs + kPanel - 1) / kPanel;
  const int64_t width = parts == 1 ? inputs : kPanel;
  spread_with(groups * parts, 1, threads, [] { return Scratch(); }, [&](int64_t index, int64_t, Scratch& scratch) {
    const int64_t group = index / parts, count = counts[group], from = index % parts * width;
    float* out = totals + group * outputs * inputs;
    if (!count && !add) {
      for (int64_t i = 0; i < outputs; ++i) std::fill_n(out + i * inputs + from, std::min(width, inputs - from), 0.0f);
    }
    for (int64_t start = 0; start < count; start += kMost) {
      const int64_t height = std::min(kMost, count - start), depth = (height + n - 1) / n, first = firsts[group] + start;
      const float* a;
      if constexpr (n == 1) {
        a = gather(grads, first, height, scratch.gathered);
      } else {
        scratch.gathered.resize(std::max<size_t>(scratch.gathered.size(), depth * outputs));
        pack_pairs(grads, first, height, 0, outputs, scratch.gathered.data(), outputs);
        a = scratch.gathered.data();
      }
      for (int64_t column = from; column < std::min(inputs, from + width); column += kPanel) {
        const int64_t columns = std::min(kPanel, inputs - column);
        if constexpr (n == 1) {
          pack(rows, first, height, column, columns, scratch.panel.get());
        } else {
          pack_pairs(rows, first, height, column, columns, scratch.panel.get(), kPanel);
        }
        multiply<Kind>({a, 1, outputs}, scratch.panel.get(), out + column, inputs, outputs, depth, columns, add || start > 0,
                       Ahead(a, 0, 0, 0));
      }
    }
  });
}

// silu(gate) up of gate_up [rows, 2, width], times weights [rows] -> out [rows, width].
template <class T>
void swiglu(uintptr_t x, uintptr_t weights_, uintptr_t out_, int64_t rows, int64_t width, int threads) {
  const T* gate_up = at<const T>(x);
  const float* weights = at<const float>(weights_);
  T* out = at<T>(out_);
  spread(rows, kSwigluRows, threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      const T *gate = gate_up + 2 * row * width, *up = gate + width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const V v = load(gate + i, width - i), c = clamp(v, kFar), g = where_less(v, V{} - kFar, c, v);
        store(out + row * width + i, g * sigmoid(c) * load(up + i, width - i) * weights[row], width - i);
      }
    }
  });
}

template <class T>
void swiglu_grad(uintptr_t x, uintptr_t weights_, uintptr_t above, uintptr_t grad_, uintptr_t grad_weights_, int64_t rows,
                 int64_t width, int threads) {
  const T *gate_up = at<const T>(x), *grad_out = at<const T>(above);
  const float* weights = at<const float>(weights_);
  T* grad = at<T>(grad_);
  float* grad_weights = at<float>(grad_weights_);
  spread(rows, kSwigluRows, threads, [=](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
      const T *gate = gate_up + 2 * row * width, *up = gate + width;
      T* to = grad + 2 * row * width;
      V sum = {};
      for (int64_t i = 0; i < width; i += kLanes) {
        const V v = load(gate + i, width - i), c = clamp(v, kFar), g = where_less(v, V{} - kFar, c, v);
        const V s = sigmoid(c), u = load(up + i, width - i), above = load(grad_out + row * width + i, width - i);
        const V d = above * weights[row];
        sum += above * (g * s * u);
        store(to + i, d * u * s * (1.0f + c * (1.0f - s)), width - i);
        store(to + width + i, d * g * s, width - i);
      }
      grad_weights[row] = total(sum);
    }
  });
}

// out [rows, width]: the sum of those of x's rows whose numbers are in numbers [rows, copies], in their order; none for -1.
template <class T>
void sum_rows(uintptr_t x_, uintptr_t numbers_, uintptr_t out_, int64_t rows, int64_t copies, int64_t width, int threads) {
  const T* x = at<const T>(x_);
  const int64_t* numbers = at<const int64_t>(numbers_);
  T* out = at<T>(out_);
  spread(rows, 16, threads, [=](int64_t start, int64_t stop) {
    std::vector<const T*> from;
    for (int64_t row = start; row < stop; ++row) {
      from.clear();
      for (int64_t i = row * copies; i < (row + 1) * copies; ++i) {
        if (numbers[i] >= 0) from.push_back(x + numbers[i] * width);
      }
      for (int64_t j = 0; j < width; j += kLanes) {
        V sum = {};
        for (const T* part : from) sum += load(part + j, width - j);
        store(out + row * width + j, sum, width - j);
      }
    }
  });
}

}  // namespace

PYBIND11_MODULE(MODULE, m) {
  m.doc() = "GEMMs of experts; see megatron/kernels/cpu/experts.py.";
  m.attr("INTERFACE") = 2;  // raise it here and in experts.py when a function changes
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("multiplies_bf16", &multiplies_bf16);
  m.def("product_float32", &product<Single>, no_gil);
  m.def("product_bfloat16", &product<Pair>, no_gil);
  m.def("weight_grad_float32", &weight_grad<Single>, no_gil);
  m.def("weight_grad_bfloat16", &weight_grad<Pair>, no_gil);
  m.def("swiglu_float32", &swiglu<float>, no_gil);
  m.def("swiglu_bfloat16", &swiglu<Bf16>, no_gil);
  m.def("swiglu_grad_float32", &swiglu_grad<float>, no_gil);
  m.def("swiglu_grad_bfloat16", &swiglu_grad<Bf16>, no_gil);
  m.def("sum_rows_float32", &sum_rows<float>, no_gil);
  m.def("sum_rows_bfloat16", &sum_rows<Bf16>, no_gil);
}
