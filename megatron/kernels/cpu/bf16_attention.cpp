// Causal attention in bf16, forward and backward, on the matrix tiles of AMX or, without them, by AVX512's dot products
// of bf16 pairs; for megatron/kernels/cpu/bf16_attention.py, which checks shapes, dtypes and the processor. One head after
// another: scores, probabilities and their gradients are stored transposed, [keys, queries], so that what belongs to a
// query (its largest score, its sum) is a lane, and GEMMs need no other transpose than those of the inputs. They
// take bf16 and accumulate in fp32; softmax is fp32. Nothing depends on the number of threads. No thread holds the GIL.

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
void multiply_on_tiles(const Bf16* a, int64_t a_width, const uint32_t* b, int64_t b_width, float* out, int64_t out_width,
                       int64_t m, int64_t n, int64_t k, bool add) {
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

// out [kRows, 16 kColumns] of the same product: all its sums stay in registers.
template <int kRows, int kColumns>
inline void dot_block(const Bf16* a, int64_t a_width, const uint32_t* b, int64_t b_width, float* out,
                      int64_t out_width, int64_t k, bool add) {
  __m512 sums[kRows][kColumns];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int64_t l = 0; l < k; l += 2, b += b_width) {
    __m512bh right[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) right[j] = (__m512bh)_mm512_loadu_si512(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * a_width + l, sizeof(pair));
      const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      float* to = out + i * out_width + j * kLanes;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(sums[i][j], _mm512_loadu_ps(to)) : sums[i][j]);
    }
  }
}

// Columns j to j + 16 kColumns of the product, kRows lines at a time.
template <int kRows, int kColumns>
inline void dot_columns(const Bf16* a, int64_t a_width, const uint32_t* b, int64_t b_width, float* out, int64_t out_width,
                        int64_t m, int64_t j, int64_t k, bool add) {
  for (int64_t i = 0; i < m; i += kRows) {
    dot_block<kRows, kColumns>(a + i * a_width, a_width, b + j, b_width, out + i * out_width + j, out_width, k, add);
  }
}

// The same as multiply_on_tiles by AVX512_BF16. Four lines of 64 columns read less than eight of 32 for as many sums.
void multiply_by_dots(const Bf16* a, int64_t a_width, const uint32_t* b, int64_t b_width, float* out, int64_t out_width,
                      int64_t m, int64_t n, int64_t k, bool add) {
  int64_t j = 0;
  for (; j + 64 <= n; j += 64) dot_columns<4, 4>(a, a_width, b, b_width, out, out_width, m, j, k, add);
  for (; j < n; j += 32) dot_columns<8, 2>(a, a_width, b, b_width, out, out_width, m, j, k, add);
}

// Which instructions multiply. Tiles need their shapes in the thread that uses them: one of these lives there meanwhile.
class Multiplier {
 public:
  explicit Multiplier(bool amx) : amx_(amx) {
    if (amx_) _tile_loadconfig(&kTiles);
  }
  ~Multiplier() {
    if (amx_) _tile_release();
  }
  Multiplier(const Multiplier&) = delete;
  Multiplier& operator=(const Multiplier&) = delete;

  // See multiply_on_tiles.
  void operator()(const Bf16* a, int64_t a_width, const uint32_t* b, int64_t b_width, float* out, int64_t out_width,
                  int64_t m, int64_t n, int64_t k, bool add) const {
    (amx_ ? multiply_on_tiles : multiply_by_dots)(a, a_width, b, b_width, out, out_width, m, n, k, add);
  }

 private:
  bool amx_;
};

// ---- layouts

struct Steps {
  int64_t s, b, n;  // between positions, samples and heads, in numbers
};

// Lines of one head -> [rows, d], zero from s on.
void copy_lines(const Bf16* from, int64_t step, int64_t s, int64_t rows, int64_t d, Bf16* to) {
  for (int64_t i = 0; i < s; ++i) std::memcpy(to + i * d, from + i * step, d * sizeof(Bf16));
  std::memset(to + s * d, 0, (rows - s) * d * sizeof(Bf16));
}

// Words [lines, width] -> [width, lines + kPad]; both multiples of 16.
void transpose(const uint32_t* from, int64_t lines, int64_t width, uint32_t* to) {
  for (int64_t i = 0; i < lines; i += kLanes) {
    for (int64_t j = 0; j < width; j += kLanes) {
      V v[kLanes];
#pragma GCC unroll 16
      for (int64_t k = 0; k < kLanes; ++k) std::memcpy(&v[k], from + (i + k) * width + j, sizeof(v[k]));
      transpose(v);
#pragma GCC unroll 16
      for (int64_t k = 0; k < kLanes; ++k) std::memcpy(to + (j + k) * (lines + kPad) + i, &v[k], sizeof(v[k]));
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

inline void store_bf16(Bf16* to, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(v));
}

// fp32 [d, width] times `scale`, or times scales[column] -> s lines of bf16, `step` apart. There are columns up to the next
// multiple of 16.
void write_transposed(const float* from, int64_t width, int64_t s, int64_t d, const float* scales, float scale, Bf16* to,
                      int64_t step) {
  for (int64_t i = 0; i < s; i += kLanes) {
    const V by = scales == nullptr ? V{} + scale : load(scales + i);
    for (int64_t j = 0; j < d; j += kLanes) {
      V v[kLanes];
#pragma GCC unroll 16
      for (int64_t k = 0; k < kLanes; ++k) v[k] = load(from + (j + k) * width + i) * by;
      transpose(v);
      const int64_t lines = std::min(kLanes, s - i);
      for (int64_t k = 0; k < lines; ++k) store_bf16(to + (i + k) * step + j, same_bits<__m512>(v[k]));
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

// Lanes of the queries from `query` on that see `key`: keys up to their own position, with documents from first[query] on.
inline __mmask16 seeing(int64_t key, int64_t query, const int32_t* first) {
  const int64_t hidden = key - query;
  const __mmask16 before = hidden <= 0 ? 0xffff : hidden >= kLanes ? 0 : static_cast<__mmask16>(0xffff << hidden);
  if (first == nullptr) return before;
  return _mm512_mask_cmple_epi32_mask(before, _mm512_loadu_si512(first + query), _mm512_set1_epi32(static_cast<int>(key)));
}

// Two lines as words of pairs of bf16.
inline __m512i paired(__m512 low, __m512 high) {
  const __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
  const __m512i b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

struct Shape {
  int64_t s, b, n, groups, d;
  float scale;  // of scores
  int64_t rows() const { return (s + kBlock - 1) / kBlock * kBlock; }
};

constexpr float kLog2E = 1.44269504f;

// ---- documents

// Where the document of each position begins, of one sample; does nothing without documents.
class Documents {
 public:
  explicit Documents(const Shape& x) : x_(x), first_(x.rows()) {}

  // `first` [s] never falls; positions of the padding belong to the last document. nullptr: no documents.
  void set(const int32_t* first) {
    there_ = first != nullptr && x_.s > 0;
    if (!there_) return;
    std::copy(first, first + x_.s, first_.begin());
    std::fill(first_.begin() + x_.s, first_.end(), first[x_.s - 1]);
  }

  const int32_t* first() const { return there_ ? first_.data() : nullptr; }

  // The first block of keys that queries from `query` on see.
  int64_t first_key(int64_t query) const { return there_ ? first_[query] / kBlock * kBlock : 0; }

  // The end of the last block of queries that see one of the 32 keys from `key` on.
  int64_t last_query(int64_t key) const {
    if (!there_) return x_.rows();
    const auto end = std::upper_bound(first_.begin() + key, first_.end(), static_cast<int32_t>(key + kBlock - 1));
    return (end - first_.begin() + kBlock - 1) / kBlock * kBlock;
  }

 private:
  Shape x_;
  bool there_ = false;
  std::vector<int32_t> first_;
};

// ---- dropout

constexpr int64_t kKept = 8;  // keys whose masks are drawn at once

// Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which passes all of
// BigCrush: four words of 32 bits that are a function of four words of counter, c[0] to c[3], and a key of 64 bits.
inline void philox(uint64_t key, __m512i* c) {
  constexpr __mmask16 kOdd = 0xaaaa;
  const __m512i multipliers[2] = {_mm512_set1_epi64(0xD2511F53), _mm512_set1_epi64(0xCD9E8D57)};
  uint32_t low_key = static_cast<uint32_t>(key), high_key = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 7; ++round) {
    __m512i low[2], high[2];
    for (int i = 0; i < 2; ++i) {
      const __m512i even = _mm512_mul_epu32(c[2 * i], multipliers[i]);
      const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(c[2 * i], 32), multipliers[i]);
      low[i] = _mm512_mask_shuffle_epi32(even, kOdd, odd, _MM_PERM_CCAA);
      high[i] = _mm512_mask_shuffle_epi32(odd, static_cast<__mmask16>(~kOdd), even, _MM_PERM_DDBB);
    }
    constexpr int kXor = 0x96;  // of three
    c[0] = _mm512_ternarylogic_epi32(high[1], c[1], _mm512_set1_epi32(static_cast<int>(low_key)), kXor);
    c[1] = low[1];
    c[2] = _mm512_ternarylogic_epi32(high[0], c[3], _mm512_set1_epi32(static_cast<int>(high_key)), kXor);
    c[3] = low[0];
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
}

// Which probabilities dropout keeps: a function of the seed, the sample, the head, the query and the key alone, so that
// backward and a recomputed forward draw the same. 16 random bits decide over one of them. The probability is no multiple
// of 2^-16: each query takes the threshold below or above it at random, so that it is kept to 2^-32.
class Dropout {
 public:
  Dropout(int64_t rows, double p, uint64_t seed)
      : seed_(seed), level_(static_cast<uint64_t>(std::llround((1.0 - p) * 0x1p48))), drops_(p > 0.0),
        factor_(static_cast<float>(1.0 / (1.0 - p))), limits_(drops_ ? rows : 0) {}

  bool drops() const { return drops_; }

  // What the kept ones are multiplied by.
  float factor() const { return factor_; }

  // From here on for this head of this sample, of which there are `n`.
  void set(int64_t sample, int64_t n, int64_t head) {
    head_ = static_cast<int>(sample * n + head);
    for (size_t query = 0; query < limits_.size(); query += kLanes) {
      __m512i words[4];
      draw(query, 0, kThresholds, words);
      uint32_t dither[kLanes];
      _mm512_storeu_si512(dither, words[0]);
      for (int64_t i = 0; i < kLanes; ++i) {
        limits_[query + i] = static_cast<uint32_t>(((level_ + dither[i]) >> 32 << 16) - 1);
      }
    }
  }

  // Of the keys key to key + 7, a multiple of 8: the lanes of the queries from `query` on that keep them.
  void keep(int64_t key, int64_t query, __mmask16* kept) const {
    const __m512i limit = _mm512_loadu_si512(limits_.data() + query);
    __m512i words[4];
    draw(query, key / kKept, kMasks, words);
    for (int64_t i = 0; i < 4; ++i) {
      kept[2 * i] = _mm512_cmple_epu32_mask(_mm512_slli_epi32(words[i], 16), limit);
      kept[2 * i + 1] = _mm512_cmple_epu32_mask(words[i], limit);
    }
  }

 private:
  enum Purpose { kMasks, kThresholds };

  void draw(int64_t query, int64_t keys, Purpose purpose, __m512i* words) const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    words[0] = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(query)));
    words[1] = _mm512_set1_epi32(static_cast<int>(keys));
    words[2] = _mm512_set1_epi32(head_);
    words[3] = _mm512_set1_epi32(purpose);
    philox(seed_, words);
  }

  uint64_t seed_, level_;
  bool drops_;
  float factor_;
  int head_ = 0;
  std::vector<uint32_t> limits_;  // 2^16 times the threshold of each query, less 1
};

// ---- forward

struct ForwardScratch {
  std::vector<Bf16> keys, line;
  std::vector<uint32_t> words, queries, values, probs;
  std::vector<float> scores, out;
  Documents documents;
  Dropout dropout;
  ForwardScratch(const Shape& x, double p, uint64_t seed)
      : keys(x.rows() * x.d), line(x.rows() * x.d), words(x.rows() / 2 * x.d), queries(x.d / 2 * (x.rows() + kPad)),
        values(x.d * (x.rows() / 2 + kPad)), probs(x.rows() / 2 * kBlock), scores(x.rows() * kBlock), out(x.d * kBlock),
        documents(x), dropout(x.rows(), p, seed) {}
};

// Softmax over the lines of scores of the keys first_key to last_key, [keys, 32], of the queries from `query` on: pairs of
// lines of unnormalized probabilities, without those that dropout drops, and of each query 1 / their sum (with them) and
// log2 of the sum of 2^(scale score).
template <bool kDrops>
void softmax(const float* scores, int64_t first_key, int64_t last_key, int64_t query, float scale, const int32_t* first,
             const Dropout& dropout, uint32_t* probs, float* inverse, float* log_sum) {
  for (int64_t half = 0; half < kBlock; half += kLanes) {
    const auto score_of = [&](int64_t key) { return _mm512_loadu_ps(scores + (key - first_key) * kBlock + half); };
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t key = first_key; key < last_key; ++key) {
      largest = _mm512_mask_max_ps(largest, seeing(key, query + half, first), score_of(key), largest);
    }
    const __m512 by = _mm512_set1_ps(scale), least = _mm512_mul_ps(largest, by);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t group = first_key; group < last_key; group += kKept) {
      __mmask16 kept[kKept];
      if (kDrops) dropout.keep(group, query + half, kept);
      for (int64_t key = group; key < group + kKept; key += 2) {
        __m512 two[2];
        for (int64_t i = 0; i < 2; ++i) {
          const __m512 p = power_of_two(_mm512_fmsub_ps(score_of(key + i), by, least));
          two[i] = _mm512_maskz_mov_ps(seeing(key + i, query + half, first), p);
          sum = _mm512_add_ps(sum, two[i]);
          if (kDrops) two[i] = _mm512_maskz_mov_ps(kept[key - group + i], two[i]);
        }
        _mm512_storeu_si512(probs + (key - first_key) / 2 * kBlock + half, paired(two[0], two[1]));
      }
    }
    float sums[kLanes], tops[kLanes];
    _mm512_storeu_ps(sums, sum);
    _mm512_storeu_ps(tops, least);
    for (int64_t i = 0; i < kLanes; ++i) {
      inverse[half + i] = dropout.factor() / sums[i];
      log_sum[half + i] = tops[i] + std::log2(sums[i]);
    }
  }
}

void forward_head(const Shape& x, const Multiplier& multiply, ForwardScratch& to, const Bf16* q, int64_t step_q, Bf16* out, int64_t step_out,
                  float* log_sums) {
  const int64_t rows = x.rows();
  copy_lines(q, step_q, x.s, rows, x.d, to.line.data());
  transpose(reinterpret_cast<const uint32_t*>(to.line.data()), rows, x.d / 2, to.queries.data());
  for (int64_t start = 0; start < x.s; start += kBlock) {
    const int64_t first = to.documents.first_key(start), last = start + kBlock;
    float inverse[kBlock];
    multiply(to.keys.data() + first * x.d, x.d, to.queries.data() + start, rows + kPad, to.scores.data(), kBlock,
             last - first, kBlock, x.d, false);
    (to.dropout.drops() ? softmax<true> : softmax<false>)(
        to.scores.data(), first, last, start, x.scale * kLog2E, to.documents.first(), to.dropout, to.probs.data(), inverse,
        log_sums + start);
    multiply(reinterpret_cast<const Bf16*>(to.values.data()) + first, rows + 2 * kPad, to.probs.data(), kBlock,
             to.out.data(), kBlock, x.d, kBlock, last - first, false);
    write_transposed(to.out.data(), kBlock, std::min(kBlock, x.s - start), x.d, inverse, 1.0f, out + start * step_out,
                     step_out);
  }
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Where the documents of a sample begin, in int32 [b, s] at `address`; 0: there are none.
const int32_t* first_of(uintptr_t address, const Shape& x, int64_t sample) {
  return address == 0 ? nullptr : at<const int32_t>(address) + sample * x.s;
}

// q [s, b, n, d], k and v [s, b, groups, d] with the given steps, out [s, b, n, d] contiguous; log_sums [b, n, rows] fp32;
// where each position's document begins, int32 [b, s], or 0. `drop` is a probability.
void forward(std::array<uintptr_t, 6> addresses, std::array<std::array<int64_t, 3>, 3> steps, std::array<int64_t, 5> sizes,
             float scale, double drop, uint64_t seed, bool amx, int threads) {
  const Shape x{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], scale};
  const int64_t heads = x.n / x.groups;
  const auto work = [&](int64_t unit, int64_t, ForwardScratch& scratch) {
    const int64_t sample = unit / x.groups, group = unit % x.groups;
    const Multiplier multiply(amx);
    const auto head_of = [&](int which, int64_t head) {
      return at<const Bf16>(addresses[which]) + sample * steps[which][1] + head * steps[which][2];
    };
    scratch.documents.set(first_of(addresses[5], x, sample));
    copy_lines(head_of(1, group), steps[1][0], x.s, x.rows(), x.d, scratch.keys.data());
    copy_lines(head_of(2, group), steps[2][0], x.s, x.rows(), x.d, scratch.line.data());
    pair_lines(scratch.line.data(), x.rows(), x.d, scratch.words.data());
    transpose(scratch.words.data(), x.rows() / 2, x.d, scratch.values.data());
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      scratch.dropout.set(sample, x.n, head);
      forward_head(x, multiply, scratch, head_of(0, head), steps[0][0], at<Bf16>(addresses[3]) + (sample * x.n + head) * x.d,
                   x.b * x.n * x.d, at<float>(addresses[4]) + (sample * x.n + head) * x.rows());
    }
  };
  spread_with(x.b * x.groups, 1, threads, [&] { return ForwardScratch(x, drop, seed); }, work);
}

// ---- backward

struct BackwardScratch {
  std::vector<Bf16> keys, values, line, probs, grads;
  std::vector<uint32_t> words, keys_across, queries, queries_across, above, above_across, pairs;
  std::vector<float> scores, grad_probs, grad_q, grad_k, grad_v, delta;
  Documents documents;
  Dropout dropout;
  BackwardScratch(const Shape& x, double p, uint64_t seed) : documents(x), dropout(x.rows(), p, seed) {
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
// probabilities (0 where dropped, else before their factor) and gradients of scores (before their scale) in bf16, the
// latter as pairs of lines, too.
template <bool kDrops>
void softmax_grad(const Shape& x, BackwardScratch& to, int64_t key, int64_t start, int64_t queries, const float* log_sums) {
  constexpr int64_t width = kChunk + kPad;
  const __m512 by = _mm512_set1_ps(x.scale * kLog2E), factor = _mm512_set1_ps(to.dropout.factor());
  const int32_t* first = to.documents.first();
  for (int64_t i = 0; i < kBlock; i += kKept) {
    for (int64_t query = 0; query < queries; query += kLanes) {
      const __m512 log_sum = _mm512_loadu_ps(log_sums + start + query);
      const __m512 delta = _mm512_loadu_ps(to.delta.data() + start + query);
      __mmask16 kept[kKept];
      if (kDrops) to.dropout.keep(key + i, start + query, kept);
      for (int64_t pair = 0; pair < kKept; pair += 2) {
        __m512 two[2];
        for (int64_t j = 0; j < 2; ++j) {
          const int64_t line = i + pair + j, at = line * width + query;
          const __mmask16 seen = seeing(key + line, start + query, first);
          const __m512 score = _mm512_loadu_ps(to.scores.data() + at);
          const __m512 p = _mm512_maskz_mov_ps(seen, power_of_two(_mm512_fmsub_ps(score, by, log_sum)));
          __m512 grad = _mm512_loadu_ps(to.grad_probs.data() + at), dropped = p;
          if (kDrops) {
            grad = _mm512_maskz_mul_ps(kept[pair + j], grad, factor);
            dropped = _mm512_maskz_mov_ps(kept[pair + j], p);
          }
          two[j] = _mm512_mul_ps(p, _mm512_sub_ps(grad, delta));
          store_bf16(to.probs.data() + at, dropped);
          store_bf16(to.grads.data() + at, two[j]);
        }
        _mm512_storeu_si512(to.pairs.data() + (i + pair) / 2 * width + query, paired(two[0], two[1]));
      }
    }
  }
}

// Of each query the sum of out times its gradient.
void deltas(const Shape& x, const Bf16* out, const Bf16* above, int64_t step, int64_t above_step, float* to) {
  for (int64_t i = 0; i < x.rows(); ++i) {
    to[i] = i >= x.s ? 0.0f : sum_over(x.d, [=](int64_t j, auto) {
      return load(out + i * step + j) * load(above + i * above_step + j);
    });
  }
}

// What 32 keys and so many queries add to each other's gradients, and to those of the values.
void add_chunk(const Shape& x, const Multiplier& multiply, BackwardScratch& to, int64_t key, int64_t start, int64_t queries, const float* log_sums) {
  constexpr int64_t width = kChunk + kPad;
  const int64_t d = x.d, across = x.rows() + kPad;
  multiply(to.keys.data() + key * d, d, to.queries_across.data() + start, across, to.scores.data(), width, kBlock, queries,
           d, false);
  multiply(to.values.data() + key * d, d, to.above_across.data() + start, across, to.grad_probs.data(), width, kBlock,
           queries, d, false);
  (to.dropout.drops() ? softmax_grad<true> : softmax_grad<false>)(x, to, key, start, queries, log_sums);
  multiply(to.probs.data(), width, to.above.data() + start / 2 * d, d, to.grad_v.data() + key * d, d, kBlock, d, queries,
           true);
  multiply(to.grads.data(), width, to.queries.data() + start / 2 * d, d, to.grad_k.data() + key * d, d, kBlock, d, queries,
           true);
  multiply(reinterpret_cast<const Bf16*>(to.keys_across.data()) + key, x.rows() + 2 * kPad, to.pairs.data(), width,
           to.grad_q.data() + start, across, d, queries, kBlock, true);
}

// Adds to the gradients of its group's key and value, and writes the query's.
void backward_head(const Shape& x, const Multiplier& multiply, BackwardScratch& to, const Bf16* q, int64_t step_q, const float* log_sums, Bf16* grad_q,
                   int64_t step_grad) {
  const int64_t rows = x.rows(), width = rows + kPad, d = x.d;
  copy_lines(q, step_q, x.s, rows, d, to.line.data());
  transpose(reinterpret_cast<const uint32_t*>(to.line.data()), rows, d / 2, to.queries_across.data());
  pair_lines(to.line.data(), rows, d, to.queries.data());
  std::fill(to.grad_q.begin(), to.grad_q.end(), 0.0f);
  for (int64_t key = 0; key < x.s; key += kBlock) {
    const int64_t last = to.documents.last_query(key);
    for (int64_t start = key; start < last; start += kChunk) {
      add_chunk(x, multiply, to, key, start, std::min(kChunk, last - start), log_sums);
    }
  }
  write_transposed(to.grad_q.data(), width, x.s, d, nullptr, x.scale, grad_q, step_grad);
}

void write_lines(const std::vector<float>& from, const Shape& x, float scale, Bf16* to, int64_t step) {
  for (int64_t i = 0; i < x.s; ++i) {
    for (int64_t j = 0; j < x.d; j += kLanes) {
      store_bf16(to + i * step + j, same_bits<__m512>(load(from.data() + i * x.d + j) * scale));
    }
  }
}

// Inputs: q, k, v, the gradient above, out (contiguous), log_sums; then gradients of q, k and v; then the documents as in
// forward, as the dropout is. Steps of all but log_sums and documents.
void backward(std::array<uintptr_t, 10> addresses, std::array<std::array<int64_t, 3>, 9> steps, std::array<int64_t, 5> sizes,
              float scale, double drop, uint64_t seed, bool amx, int threads) {
  const Shape x{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], scale};
  const int64_t heads = x.n / x.groups;
  const auto work = [&](int64_t unit, int64_t, BackwardScratch& scratch) {
    const int64_t sample = unit / x.groups, group = unit % x.groups;
    const Multiplier multiply(amx);
    const auto head_of = [&](int which, int64_t head) {
      return at<Bf16>(addresses[which]) + sample * steps[which][1] + head * steps[which][2];
    };
    scratch.documents.set(first_of(addresses[9], x, sample));
    copy_lines(head_of(1, group), steps[1][0], x.s, x.rows(), x.d, scratch.keys.data());
    copy_lines(head_of(2, group), steps[2][0], x.s, x.rows(), x.d, scratch.values.data());
    pair_lines(scratch.keys.data(), x.rows(), x.d, scratch.words.data());
    transpose(scratch.words.data(), x.rows() / 2, x.d, scratch.keys_across.data());
    std::fill(scratch.grad_k.begin(), scratch.grad_k.end(), 0.0f);
    std::fill(scratch.grad_v.begin(), scratch.grad_v.end(), 0.0f);
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      const Bf16* above = head_of(3, head);
      scratch.dropout.set(sample, x.n, head);
      deltas(x, head_of(4, head), above, steps[4][0], steps[3][0], scratch.delta.data());
      copy_lines(above, steps[3][0], x.s, x.rows(), x.d, scratch.line.data());
      transpose(reinterpret_cast<const uint32_t*>(scratch.line.data()), x.rows(), x.d / 2, scratch.above_across.data());
      pair_lines(scratch.line.data(), x.rows(), x.d, scratch.above.data());
      backward_head(x, multiply, scratch, head_of(0, head), steps[0][0],
                    at<const float>(addresses[5]) + (sample * x.n + head) * x.rows(), head_of(6, head), steps[6][0]);
    }
    write_lines(scratch.grad_k, x, x.scale, head_of(7, group), steps[7][0]);
    write_lines(scratch.grad_v, x, scratch.dropout.factor(), head_of(8, group), steps[8][0]);
  };
  spread_with(x.b * x.groups, 1, threads, [&] { return BackwardScratch(x, drop, seed); }, work);
}

// The masks of forward and backward, 1 where a probability is kept: bytes [b, n, s, s]; for tests.
void keep_mask(uintptr_t out, std::array<int64_t, 3> sizes, double drop, uint64_t seed) {
  const auto [s, b, n] = sizes;
  const int64_t rows = Shape{s, b, n, n, 0, 0.0f}.rows();
  Dropout dropout(rows, drop, seed);
  for (int64_t head = 0; head < b * n; ++head) {
    dropout.set(head / n, n, head % n);
    for (int64_t query = 0; query < s; query += kLanes) {
      for (int64_t key = 0; key < s; key += kKept) {
        __mmask16 kept[kKept];
        dropout.keep(key, query, kept);
        for (int64_t i = query; i < std::min(query + kLanes, s); ++i) {
          for (int64_t j = key; j < std::min(key + kKept, s); ++j) {
            at<uint8_t>(out)[(head * s + i) * s + j] = kept[j - key] >> (i - query) & 1;
          }
        }
      }
    }
  }
}

}  // namespace

PYBIND11_MODULE(bf16_attention_cpp, m) {
  m.doc() = "Attention in bf16; see megatron/kernels/cpu/bf16_attention.py.";
  m.attr("INTERFACE") = 2;  // raise it here and in bf16_attention.py when a function changes
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("tiles_are_there", &tiles_are_there);
  m.def("forward", &forward, unlocked);
  m.def("backward", &backward, unlocked);
  m.def("keep_mask", &keep_mask, unlocked);
}
