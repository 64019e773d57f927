// A register of fp32 numbers at a time, read from and rounded to fp32 or bf16, and work spread over threads; for the C++
// files next to it. The register is the widest of the level of x86-64 that is built for: wider vectors would be kept in
// memory by the compiler, which makes GELU seven times as slow.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include <immintrin.h>

namespace {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
typedef float V __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));

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

// ---- comparisons

#ifdef __AVX512F__
typedef __m512 Register;
inline Register largest_of(Register a, Register b) { return _mm512_max_ps(a, b); }
inline Register smallest_of(Register a, Register b) { return _mm512_min_ps(a, b); }
template <int kPredicate>
inline Register choose(Register a, Register b, Register yes, Register no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, kPredicate), no, yes);
}
#elif defined(__AVX2__)
typedef __m256 Register;
inline Register largest_of(Register a, Register b) { return _mm256_max_ps(a, b); }
inline Register smallest_of(Register a, Register b) { return _mm256_min_ps(a, b); }
template <int kPredicate>
inline Register choose(Register a, Register b, Register yes, Register no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, kPredicate));
}
#endif

// The larger of two; b where one of them is NaN.
inline V larger(V a, V b) { return same_bits<V>(largest_of(same_bits<Register>(a), same_bits<Register>(b))); }

// The smaller of two; b where one of them is NaN.
inline V smaller(V a, V b) { return same_bits<V>(smallest_of(same_bits<Register>(a), same_bits<Register>(b))); }

// NaN stays NaN.
inline V clamp(V v, float limit) { return larger(V{} - limit, smaller(V{} + limit, v)); }

// yes where a < b, else no.
inline V where_less(V a, V b, V yes, V no) {
  const auto chosen = choose<_CMP_LT_OQ>(same_bits<Register>(a), same_bits<Register>(b), same_bits<Register>(yes),
                                         same_bits<Register>(no));
  return same_bits<V>(chosen);
}

// yes where v is NaN, else no.
inline V where_nan(V v, V yes, V no) {
  const Register r = same_bits<Register>(v);
  return same_bits<V>(choose<_CMP_UNORD_Q>(r, r, same_bits<Register>(yes), same_bits<Register>(no)));
}

// All bits set in the first `count` lanes (of 0 to kLanes), none in the others.
inline I first_lanes(int64_t count) {
  static constexpr int32_t kEdge[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  I lanes;
  std::memcpy(&lanes, kEdge + 16 - count, sizeof(lanes));
  return lanes;
}

// The first `count` lanes; the others become 0.
inline V first(V v, int64_t count) {
  return count >= kLanes ? v : same_bits<V>(same_bits<I>(v) & first_lanes(count));
}

// To the nearest bf16, to even ones between two; NaN stays NaN.
inline H to_bf16(V v) {
  const U bits = same_bits<U>(v);
  const V rounded = same_bits<V>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return __builtin_convertvector(same_bits<U>(where_nan(v, same_bits<V>(U{} + 0x7fc0u), rounded)), H);
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

// Adds to each lane the one whose number differs in this bit.
template <int bit>
inline V add_lanes(V v) {
  I from;
  for (int i = 0; i < kLanes; ++i) from[i] = i ^ bit;
  return v + __builtin_shuffle(v, from);
}

// Sum of all lanes.
inline float total(V v) {
  if constexpr (kLanes == 16) v = add_lanes<8 % kLanes>(v);  // % kLanes: for 8 lanes the line is compiled, too
  v = add_lanes<2>(add_lanes<4>(v));
  return v[0] + v[1];
}

// Swaps two corners of each block of 2 half rows and columns.
template <int half>
inline void swap_corners(V* v) {
  I upper, lower;  // where each number comes from; kLanes and more: the lower row
  for (int k = 0; k < kLanes; ++k) {
    upper[k] = k & half ? kLanes + (k ^ half) : k;
    lower[k] = k & half ? kLanes + k : k ^ half;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & half) continue;
    const V a = v[i], b = v[i + half];
    v[i] = __builtin_shuffle(a, b, upper);
    v[i + half] = __builtin_shuffle(a, b, lower);
  }
}

// v[i][j] -> v[j][i].
inline void transpose(V (&v)[kLanes]) {
  if constexpr (kLanes == 16) swap_corners<8 % kLanes>(v);  // as in `total`
  swap_corners<4>(v);
  swap_corners<2>(v);
  swap_corners<1>(v);
}

typedef std::integral_constant<int64_t, kLanes> Whole;  // a count of numbers that fill a register

// body(i, count) for each register's worth of `size` numbers, from i on. `count` is Whole but for the last one, so that a
// load or a store of so many is a plain one.
template <class Body>
inline void each_register(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, Whole{});
  if (i < size) body(i, size - i);
}

// The sum of term(i, count) over such registers; four sums, so that none waits for the one before.
template <class Term>
inline float sum_over(int64_t size, const Term& term) {
  V a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    a += term(i, Whole{});
    b += term(i + kLanes, Whole{});
    c += term(i + 2 * kLanes, Whole{});
    d += term(i + 3 * kLanes, Whole{});
  }
  each_register(size - i, [&](int64_t rest, auto count) { a += term(i + rest, count); });
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

constexpr float kFar = 87.0f;  // sigmoids from there on are as good as 0 and 1

// For |x| <= 87.5.
inline V sigmoid(V x) { return inverse_of(1.0f + exp_of(-x)); }

// GOMP_parallel of the OpenMP runtime that torch's operations run on; null where torch has none (another runtime).
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

inline Parallel find_parallel() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch ? reinterpret_cast<Parallel>(dlsym(torch, "GOMP_parallel")) : nullptr;
}

// work() on up to `threads` threads, the caller among them: torch's own threads, which wait for work anyway. Threads of
// our own would compete with those for the cores. Without that runtime threads are started.
template <class Work>
void on_threads(int64_t threads, const Work& work) {
  static const Parallel parallel = find_parallel();
  if (threads <= 1) return work();
  if (parallel) {
    const auto call = [](void* data) { (*static_cast<const Work*>(data))(); };
    return parallel(call, const_cast<Work*>(&work), static_cast<unsigned>(threads), 0);
  }
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: the existing ones do the work
  }
  work();
  for (std::thread& other : others) other.join();
}

// work(start, stop, scratch) for every run of `step` of `size` items; the caller is one of up to `threads` threads. Runs are
// the same whatever the number of threads, and each is done by one. `make` makes a thread's scratch.
template <class Make, class Work>
void spread_with(int64_t size, int64_t step, int64_t threads, const Make& make, const Work& work) {
  const int64_t runs = (size + step - 1) / step;
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  on_threads(std::min(threads, runs), [&] {
    try {
      auto scratch = make();
      for (int64_t run; (run = next.fetch_add(1, std::memory_order_relaxed)) < runs;) {
        work(run * step, run + 1 < runs ? (run + 1) * step : size, scratch);
      }
    } catch (...) {  // no memory: it must not leave a thread of OpenMP's, and the caller has to know
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
      next = runs;
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// The same for work(start, stop).
template <class Work>
void spread(int64_t size, int64_t step, int64_t threads, const Work& work) {
  spread_with(size, step, threads, [] { return 0; }, [&](int64_t start, int64_t stop, int) { work(start, stop); });
}

}  // namespace
