// AMX's tile instructions in plain C++, so that a processor without AMX runs the code that uses them (test_tile_attention.py
// compiles tiles.cpp with `-include` of this file). Each product is two fused additions in order, as the instruction does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace emulated {

struct Tile {
  uint32_t words[16][16];
};

inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void configure(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  uint16_t widths[8];
  std::memcpy(widths, bytes + 16, sizeof(widths));
  configured = bytes[0] == 1;
  for (int i = 0; i < 8; ++i) configured = configured && widths[i] == 64 && bytes[48 + i] == 16;
}

inline void release() { configured = false; }

// NaN everywhere where the instruction would be an error: the thread has no tiles.
inline void fill(Tile& tile, uint32_t word) {
  for (auto& line : tile.words) {
    for (uint32_t& each : line) each = configured ? word : 0x7fc07fc0u;
  }
}

inline void read(int to, const void* from, int64_t step) {
  fill(tiles[to], 0);
  for (int i = 0; i < 16 && configured; ++i) std::memcpy(tiles[to].words[i], static_cast<const char*>(from) + i * step, 64);
}

inline void write(int from, void* to, int64_t step) {
  for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(to) + i * step, tiles[from].words[i], 64);
}

inline float number(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void multiply(int to, int left, int right) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      float sum = number(tiles[to].words[i][j]);
      for (int k = 0; k < 16; ++k) {
        const uint32_t a = tiles[left].words[i][k], b = tiles[right].words[k][j];
        sum = std::fma(number(a << 16), number(b << 16), sum);
        sum = std::fma(number(a & 0xffff0000u), number(b & 0xffff0000u), sum);
      }
      std::memcpy(&tiles[to].words[i][j], &sum, sizeof(sum));
    }
  }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_loadd emulated::read
#define _tile_stored emulated::write
#define _tile_zero(to) emulated::fill(emulated::tiles[to], 0)
#define _tile_dpbf16ps emulated::multiply
