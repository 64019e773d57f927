// Sixteen fp32 numbers at a time, read from and rounded to fp32 or bf16, and work spread over threads; for the C++ files
// beside it. The compiler turns them into the registers that the level of x86-64 it builds for has.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
constexpr int64_t kLanes = 16;

struct Bf16 {
  uint16_t bits;
};

template <class To, class From>
inline To same_bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline V load(const float* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline V load(const Bf16* from) {
  H half;
  std::memcpy(&half, from, sizeof(half));
  return same_bits<V>(__builtin_convertvector(half, U) << 16);
}

inline void store(float* to, V v) { std::memcpy(to, &v, sizeof(v)); }

// To the nearest bf16, to even ones between two; NaN stays NaN.
inline H to_bf16(V v) {
  const U bits = same_bits<U>(v);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v == v ? rounded : U{} + 0x7fc0u, H);
}

inline void store(Bf16* to, V v) {
  const H half = to_bf16(v);
  std::memcpy(to, &half, sizeof(half));
}

// The first `count` of them, or all if there are as many; the others are 0.
template <class T>
inline V load(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T part[kLanes] = {};
  std::memcpy(part, from, count * sizeof(T));
  return load(part);
}

template <class T>
inline void store(T* to, V v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T part[kLanes];
  store(part, v);
  std::memcpy(to, part, count * sizeof(T));
}

// NaN stays NaN.
inline V clamp(V v, float limit) {
#ifdef __AVX512F__
  return same_bits<V>(_mm512_max_ps(_mm512_set1_ps(-limit), _mm512_min_ps(_mm512_set1_ps(limit), same_bits<__m512>(v))));
#else
  v = v > limit ? V{} + limit : v;
  return v < -limit ? V{} - limit : v;
#endif
}

inline V larger(V a, V b) {
#ifdef __AVX512F__
  return same_bits<V>(_mm512_max_ps(same_bits<__m512>(a), same_bits<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}

// The first `count` lanes; the others become 0.
inline V first(V v, int64_t count) {
  constexpr I lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return count >= kLanes ? v : lanes < static_cast<int32_t>(count) ? v : V{};
}

// Sum of all lanes, in one order on every machine.
inline float total(V v) {
  v += __builtin_shuffle(v, I{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, I{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  v += __builtin_shuffle(v, I{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return v[0] + v[1];
}

// The sum of term(i) over i = 0, 16, ... below `width`; four sums, so that none waits for the one before.
template <class Term>
inline float sum_over(int64_t width, const Term& term) {
  V a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    a += term(i);
    b += term(i + kLanes);
    c += term(i + 2 * kLanes);
    d += term(i + 3 * kLanes);
  }
  for (; i < width; i += kLanes) a += term(i);
  return total((a + b) + (c + d));
}

// 1 / v for v from 1 on, to a unit in the last place.
inline V inverse_of(V v) {
#ifdef __AVX512F__
  const V guess = same_bits<V>(_mm512_rcp14_ps(same_bits<__m512>(v)));
  return guess + guess * (1.0f - v * guess);
#else
  return 1.0f / v;
#endif
}

// e^v for |v| <= 87.5: with v = n ln 2 + r, |r| <= ln 2 / 2, it is 2^n e^r, and e^r its Taylor series to r^7, off by less
// than a unit in the last place.
inline V exp_of(V v) {
  const V shifted = v * 1.44269504f + 12582912.0f;  // the last bits of the sum are n
  const V n = shifted - 12582912.0f;
  const V r = v - n * 0.693145752f - n * 1.42860682e-6f;
  V e = r * (1.0f / 5040) + 1.0f / 720;
  e = e * r + 1.0f / 120;
  e = e * r + 1.0f / 24;
  e = e * r + 1.0f / 6;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  return same_bits<V>(same_bits<I>(e) + (same_bits<I>(shifted) << 23));
}

// work(start, stop, scratch) for every run of `step` of `size` items; the caller is one of up to `threads` threads. Runs are
// the same whatever the number of threads, and each is done by one. `make` makes a thread's scratch.
template <class Make, class Work>
void spread_with(int64_t size, int64_t step, int64_t threads, const Make& make, const Work& work) {
  const int64_t runs = (size + step - 1) / step;
  std::atomic<int64_t> next{0};
  const auto loop = [&] {
    auto scratch = make();
    for (int64_t run; (run = next.fetch_add(1, std::memory_order_relaxed)) < runs;) {
      work(run * step, run + 1 < runs ? (run + 1) * step : size, scratch);
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads && i < runs; ++i) others.emplace_back(loop);
  } catch (const std::system_error&) {  // no more threads: those there are do it
  }
  loop();
  for (std::thread& other : others) other.join();
}

// The same for work(start, stop).
template <class Work>
void spread(int64_t size, int64_t step, int64_t threads, const Work& work) {
  spread_with(size, step, threads, [] { return 0; }, [&](int64_t start, int64_t stop, int) { work(start, stop); });
}

}  // namespace
