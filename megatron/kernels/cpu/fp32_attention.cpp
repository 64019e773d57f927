// Causal attention in fp32 arithmetic, forward and backward; for megatron/kernels/cpu/fp32_attention.py, which checks shapes
// and dtypes. Inputs are fp32 or bf16. Scores are kept transposed, [keys, queries], so that what belongs to a query (its
// largest score, its sum) is a lane. One head at a time; its keys, values and queries are copied to scratch memory in fp32,
// padded with zeros. Nothing depends on the number of threads. Built once for each level of x86-64 (setup.py). No thread
// holds the GIL here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "vectors.h"

namespace py = pybind11;

namespace {

constexpr int64_t kBlock = 32;  // queries of a block in forward, keys of a block in backward
constexpr int64_t kHalf = 16;   // of a block: the first half of its queries does not see the second half of its keys
constexpr int64_t kChunk = 64;  // queries that backward takes at a time: their scores stay in the first cache

// ---- GEMM

constexpr int kMostRows = kLanes == 16 ? 8 : 6;  // of a tile, whose sums stay in registers

// A matrix whose element (i, l) is at i * row + l * column.
struct Matrix {
  const float* at;
  int64_t row, column;
};

// out [R, C registers] (+)= a [R, k] b [k, C registers]; b and out have rows of the given widths.
template <int R, int C>
inline void multiply_tile(Matrix a, const float* b, int64_t b_width, float* out, int64_t out_width, int64_t k, bool add) {
  V sums[R][C] = {};
  for (int64_t l = 0; l < k; ++l, b += b_width) {
    V columns[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) columns[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const float factor = a.at[i * a.row + l * a.column];
#pragma GCC unroll 2
      for (int j = 0; j < C; ++j) sums[i][j] += factor * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) {
      float* to = out + i * out_width + j * kLanes;
      store(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// As many rows at a time as there are registers for their sums; the last ones in groups of four.
template <int C>
inline void multiply_columns(Matrix a, const float* b, int64_t b_width, float* out, int64_t out_width, int64_t m,
                             int64_t k, bool add) {
  int64_t i = 0;
  for (; m - i >= kMostRows + 4 || m - i == kMostRows; i += kMostRows) {
    multiply_tile<kMostRows, C>({a.at + i * a.row, a.row, a.column}, b, b_width, out + i * out_width, out_width, k, add);
  }
  for (; i < m; i += 4) {
    multiply_tile<4, C>({a.at + i * a.row, a.row, a.column}, b, b_width, out + i * out_width, out_width, k, add);
  }
}

// out [m, n] (+)= a [m, k] b [k, n]; m is a multiple of 16, n of kLanes.
void multiply(Matrix a, const float* b, int64_t b_width, float* out, int64_t out_width, int64_t m, int64_t n, int64_t k,
              bool add) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) multiply_columns<2>(a, b + j, b_width, out + j, out_width, m, k, add);
  for (; j < n; j += kLanes) multiply_columns<1>(a, b + j, b_width, out + j, out_width, m, k, add);
}

// ---- layouts

inline int64_t padded(int64_t d) { return (d + kLanes - 1) / kLanes * kLanes; }

struct Shape {
  int64_t s, b, n, groups, d, d_values;                                      // values have another width than keys
  int64_t window;                                                            // positions that one sees, with itself
  float scale;                                                               // of scores
  float cap;                                                                 // of scaled scores; 0 for none
  int64_t rows() const { return (s + kBlock - 1) / kBlock * kBlock; }        // s, padded
  int64_t width() const { return padded(d); }
  int64_t width_values() const { return padded(d_values); }
};

// The vectors of one head, of width d -> fp32 [rows, padded d] times `scale`, zero where there are none.
template <class T>
void copy_head(const Shape& x, int64_t d, const T* from, int64_t step, float scale, float* to) {
  const int64_t width = padded(d);
  for (int64_t i = 0; i < x.s; ++i) {
    each_register(d, [=](int64_t j, auto count) { store(to + i * width + j, load(from + i * step + j, count) * scale); });
  }
  std::fill(to + x.s * width, to + x.rows() * width, 0.0f);
}

// [rows, width] -> [width, rows].
void transpose(const Shape& x, int64_t width, const float* from, float* to) {
  const int64_t rows = x.rows();
  for (int64_t j = 0; j < width; j += kLanes) {
    for (int64_t i = 0; i < rows; i += kLanes) {
      V v[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) v[l] = load(from + (i + l) * width + j);
      transpose(v);
      for (int64_t l = 0; l < kLanes; ++l) store(to + (j + l) * rows + i, v[l]);
    }
  }
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// e^v, and 0 for v below -87; v is at most little above 0. NaN stays NaN.
inline V exp_or_zero(V v) {
  const V e = exp_of(larger(V{} - 87.0f, v));
  return where_less(v, V{} - 87.0f, V{}, where_nan(v, v, e));
}

// cap tanh(v / cap), to some units in the last place also of small scores: there by tanh's polynomial (that of Cephes).
inline V capped(V v, float cap) {
  const V u = v / cap, square = u * u;
  V p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const V far = 2.0f * sigmoid(clamp(u * 2.0f, kFar)) - 1.0f;
  return cap * where_less(square, V{} + 0.39f, u + u * square * p, far);
}

// Lanes of the queries from `query` on that see `key` keep their value, the others get `hidden`.
inline V seen_or(V v, int64_t key, int64_t query, float hidden) {
  const I unseen = first_lanes(std::clamp<int64_t>(key - query, 0, kLanes));
  return same_bits<V>((same_bits<I>(v) & ~unseen) | (same_bits<I>(V{} + hidden) & unseen));
}

// Lanes of the queries from `query` on in whose window `key` is keep their value, the others get `hidden`.
inline V in_window_or(V v, int64_t key, int64_t query, int64_t window, float hidden) {
  const I seen = first_lanes(std::clamp<int64_t>(key + window - query, 0, kLanes));
  return same_bits<V>((same_bits<I>(v) & seen) | (same_bits<I>(V{} + hidden) & ~seen));
}

// ---- forward

struct ForwardScratch {
  std::vector<float> keys, values, lines, queries, scores, out;
  explicit ForwardScratch(const Shape& x)
      : keys(x.rows() * x.width()), values(x.rows() * x.width_values()), lines(keys.size()), queries(keys.size()),
        scores(x.rows() * kBlock), out(kBlock * x.width_values()) {}
};

// Softmax over the lines of scores [keys, kBlock] of kHalf queries, the first of them the `query`th of these keys, in place
// and not divided by its sum; of each query 1 / that sum, and the logarithm of the sum of exponentials.
void softmax(const Shape& x, float* scores, int64_t keys, int64_t query, float* inverse, float* log_sum) {
  const int64_t window = x.window;
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t lane = 0; lane < kHalf; lane += kLanes) {
    // keys that some of these queries do not see any more, and the end of those that all see
    const int64_t early = std::clamp<int64_t>(query + lane + kLanes - window, 0, keys);
    const int64_t below = std::min(keys, query + lane);
    float* line = scores + lane;
    V largest = V{} + lowest, sum = {};
    for (int64_t key = 0; key < (x.cap > 0.0f ? keys : 0); ++key) {
      store(line + key * kBlock, capped(load(line + key * kBlock), x.cap));
    }
    for (int64_t key = 0; key < early; ++key) {
      store(line + key * kBlock, in_window_or(load(line + key * kBlock), key, query + lane, window, lowest));
    }
    for (int64_t key = 0; key < below; ++key) largest = larger(largest, load(line + key * kBlock));
    for (int64_t key = below; key < keys; ++key) {
      const V score = seen_or(load(line + key * kBlock), key, query + lane, lowest);
      store(line + key * kBlock, score);
      largest = larger(largest, score);
    }
    for (int64_t key = 0; key < keys; ++key) {
      const V p = exp_or_zero(load(line + key * kBlock) - largest);
      store(line + key * kBlock, p);
      sum += p;
    }
    for (int64_t i = 0; i < kLanes; ++i) {
      inverse[lane + i] = 1.0f / sum[i];
      log_sum[lane + i] = largest[i] + std::log(sum[i]);
    }
  }
}

template <class T>
void forward_head(const Shape& x, ForwardScratch& to, const T* q, int64_t step_q, T* out, int64_t step_out,
                  float* log_sums) {
  const int64_t rows = x.rows(), width = x.width(), width_values = x.width_values();
  copy_head(x, x.d, q, step_q, x.scale, to.lines.data());
  transpose(x, width, to.lines.data(), to.queries.data());
  for (int64_t start = 0; start < x.s; start += kBlock) {
    const int64_t first = std::max<int64_t>(0, start - x.window + 1) / kHalf * kHalf;  // key in a window of these queries
    const int64_t end = start + kHalf;  // of what the first half of the queries sees; the second half sees kHalf more
    const int64_t keys = end - first;
    float *scores = to.scores.data(), *more = scores + keys * kBlock + kHalf, inverse[kBlock];
    multiply({to.keys.data() + first * width, width, 1}, to.queries.data() + start, rows, scores, kBlock, keys, kBlock, width,
             false);
    multiply({to.keys.data() + end * width, width, 1}, to.queries.data() + end, rows, more, kBlock, kHalf, kHalf, width,
             false);
    for (int64_t half : {int64_t{0}, kHalf}) {
      softmax(x, scores + half, keys + half, start - first + half, inverse + half, log_sums + start + half);
      multiply({scores + half, 1, kBlock}, to.values.data() + first * width_values, width_values,
               to.out.data() + half * width_values, width_values, kHalf, width_values, keys + half, false);
    }
    for (int64_t i = 0; i < std::min(kBlock, x.s - start); ++i) {
      each_register(x.d_values, [&](int64_t j, auto count) {
        store(out + (start + i) * step_out + j, load(to.out.data() + i * width_values + j) * inverse[i], count);
      });
    }
  }
}

// q [s, b, n, d], k [s, b, groups, d] and v [s, b, groups, d_values] with the given steps between positions, samples and
// heads, out [s, b, n, d_values] contiguous; log_sums [b, n, rows] fp32.
template <class T>
void forward(std::array<uintptr_t, 5> addresses, std::array<std::array<int64_t, 3>, 3> steps, std::array<int64_t, 6> sizes,
             int64_t window, float scale, float cap, int threads) {
  const Shape x{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], window, scale, cap};
  const int64_t heads = x.n / x.groups;
  const auto work = [&](int64_t unit, int64_t, ForwardScratch& scratch) {
    const int64_t sample = unit / x.groups, group = unit % x.groups;
    const auto head_of = [&](int which, int64_t head) {
      return at<const T>(addresses[which]) + sample * steps[which][1] + head * steps[which][2];
    };
    copy_head(x, x.d, head_of(1, group), steps[1][0], 1.0f, scratch.keys.data());
    copy_head(x, x.d_values, head_of(2, group), steps[2][0], 1.0f, scratch.values.data());
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      forward_head(x, scratch, head_of(0, head), steps[0][0], at<T>(addresses[3]) + (sample * x.n + head) * x.d_values,
                   x.b * x.n * x.d_values, at<float>(addresses[4]) + (sample * x.n + head) * x.rows());
    }
  };
  spread_with(x.b * x.groups, 1, threads, [&] { return ForwardScratch(x); }, work);
}

// ---- backward

struct BackwardScratch {
  std::vector<float> keys, values, queries, queries_across, above, above_across, grad_q, grad_k, grad_v, probs, grads, delta;
  explicit BackwardScratch(const Shape& x) {
    for (auto* all : {&keys, &queries, &queries_across, &grad_q, &grad_k}) all->resize(x.rows() * x.width());
    for (auto* all : {&values, &above, &above_across, &grad_v}) all->resize(x.rows() * x.width_values());
    for (auto* chunk : {&probs, &grads}) chunk->resize(kBlock * kChunk);
    delta.resize(x.rows());
  }
};

// From transposed scores and gradients of probabilities of so many keys from `key` on and queries from `start` on, in their
// place: probabilities and gradients of scores.
void softmax_grad(const Shape& x, BackwardScratch& to, int64_t key, int64_t keys, int64_t start, int64_t queries,
                  const float* log_sums) {
  const int64_t window = x.window;
  for (int64_t query = 0; query < queries; query += kLanes) {
    const V log_sum = load(log_sums + start + query), delta = load(to.delta.data() + start + query);
    const bool all = key + keys - 1 <= start + query;  // these queries see every key, but for the window
    const bool inside = start + query + kLanes - key <= window;
    for (int64_t i = 0; i < keys; ++i) {
      float *score = to.probs.data() + i * kChunk + query, *grad = to.grads.data() + i * kChunk + query;
      const V seen = x.cap > 0.0f ? capped(load(score), x.cap) : load(score);
      V p = exp_or_zero(seen - log_sum);
      if (!all) p = seen_or(p, key + i, start + query, 0.0f);
      if (!inside) p = in_window_or(p, key + i, start + query, window, 0.0f);
      store(score, p);
      V above = p * (load(grad) - delta);
      if (x.cap > 0.0f) above *= 1.0f - (seen / x.cap) * (seen / x.cap);
      store(grad, above);
    }
  }
}

// What so many keys from `key` on and queries from `start` on add to each other's gradients, and to those of the values.
void add_chunk(const Shape& x, BackwardScratch& to, int64_t key, int64_t keys, int64_t start, int64_t queries,
               const float* log_sums) {
  const int64_t rows = x.rows(), width = x.width(), width_values = x.width_values();
  const float *probs = to.probs.data(), *grads = to.grads.data();
  multiply({to.keys.data() + key * width, width, 1}, to.queries_across.data() + start, rows, to.probs.data(), kChunk, keys,
           queries, width, false);
  multiply({to.values.data() + key * width_values, width_values, 1}, to.above_across.data() + start, rows,
           to.grads.data(), kChunk, keys, queries, width_values, false);
  softmax_grad(x, to, key, keys, start, queries, log_sums);
  multiply({probs, kChunk, 1}, to.above.data() + start * width_values, width_values,
           to.grad_v.data() + key * width_values, width_values, keys, width_values, queries, true);
  multiply({grads, kChunk, 1}, to.queries.data() + start * width, width, to.grad_k.data() + key * width, width, keys, width,
           queries, true);
  multiply({grads, 1, kChunk}, to.keys.data() + key * width, width, to.grad_q.data() + start * width, width, queries, width,
           keys, true);
}

template <class T>
void write_head(const Shape& x, int64_t d, const std::vector<float>& from, float scale, T* to, int64_t step) {
  for (int64_t i = 0; i < x.s; ++i) {
    each_register(d, [&](int64_t j, auto count) {
      store(to + i * step + j, load(from.data() + i * padded(d) + j) * scale, count);
    });
  }
}

// Of each query the sum of out times its gradient.
template <class T>
void deltas(const Shape& x, const T* out, int64_t step, BackwardScratch& to) {
  for (int64_t i = 0; i < x.rows(); ++i) {
    const float* above = to.above.data() + i * x.width_values();
    to.delta[i] = i >= x.s ? 0.0f : sum_over(x.d_values, [=](int64_t j, auto count) {
      return load(out + i * step + j, count) * load(above + j);
    });
  }
}

// Inputs: q, k, v, the gradient above, out (contiguous), log_sums; then gradients of q, k and v. Steps of all but log_sums.
template <class T>
void backward(std::array<uintptr_t, 9> addresses, std::array<std::array<int64_t, 3>, 9> steps, std::array<int64_t, 6> sizes,
              int64_t window, float scale, float cap, int threads) {
  const Shape x{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], window, scale, cap};
  const int64_t heads = x.n / x.groups;
  const auto work = [&](int64_t unit, int64_t, BackwardScratch& scratch) {
    const int64_t sample = unit / x.groups, group = unit % x.groups;
    const auto head_of = [&](int which, int64_t head) {
      return at<T>(addresses[which]) + sample * steps[which][1] + head * steps[which][2];
    };
    copy_head(x, x.d, head_of(1, group), steps[1][0], 1.0f, scratch.keys.data());
    copy_head(x, x.d_values, head_of(2, group), steps[2][0], 1.0f, scratch.values.data());
    std::fill(scratch.grad_k.begin(), scratch.grad_k.end(), 0.0f);
    std::fill(scratch.grad_v.begin(), scratch.grad_v.end(), 0.0f);
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      const float* log_sums = at<const float>(addresses[5]) + (sample * x.n + head) * x.rows();
      copy_head(x, x.d, head_of(0, head), steps[0][0], x.scale, scratch.queries.data());
      copy_head(x, x.d_values, head_of(3, head), steps[3][0], 1.0f, scratch.above.data());
      transpose(x, x.width(), scratch.queries.data(), scratch.queries_across.data());
      transpose(x, x.width_values(), scratch.above.data(), scratch.above_across.data());
      deltas(x, head_of(4, head), steps[4][0], scratch);
      std::fill(scratch.grad_q.begin(), scratch.grad_q.end(), 0.0f);
      for (int64_t key = 0; key < x.s; key += kBlock) {
        add_chunk(x, scratch, key, kHalf, key, kHalf, log_sums);
        const int64_t end = std::min(x.rows(), (key + kBlock - 1 + x.window + kHalf - 1) / kHalf * kHalf);
        for (int64_t start = key + kHalf; start < end; start += kChunk) {
          add_chunk(x, scratch, key, kBlock, start, std::min(kChunk, end - start), log_sums);
        }
      }
      write_head(x, x.d, scratch.grad_q, x.scale, head_of(6, head), steps[6][0]);
    }
    write_head(x, x.d, scratch.grad_k, 1.0f, head_of(7, group), steps[7][0]);
    write_head(x, x.d_values, scratch.grad_v, 1.0f, head_of(8, group), steps[8][0]);
  };
  spread_with(x.b * x.groups, 1, threads, [&] { return BackwardScratch(x); }, work);
}

template <class T>
void define(py::module_& m, const std::string& dtype) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def(("forward_" + dtype).c_str(), &forward<T>, unlocked);
  m.def(("backward_" + dtype).c_str(), &backward<T>, unlocked);
}

}  // namespace

PYBIND11_MODULE(MODULE, m) {
  m.doc() = "Causal attention; see megatron/kernels/cpu/fp32_attention.py.";
  m.attr("INTERFACE") = 4;  // raise it here and in fp32_attention.py when a function changes
  define<float>(m, "float32");
  define<Bf16>(m, "bfloat16");
}
