// Reads a file into memory and adds up its words by columns while they lie in the core's cache; for megatron/checkpoint/
// checksums.py, which defines the sum and says it in numpy, too. It knows bytes only. No thread holds the GIL here.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <unistd.h>

namespace py = pybind11;

namespace {

constexpr int64_t kWords = 521, kRow = 8 * kWords;
constexpr int64_t kPiece = 32 * kRow;  // what is read at a time: whole rows, about 130 KB

template <int64_t kTogether>
void add_together(const char* at, uint64_t* columns) {
  for (int64_t i = 0; i < kWords; ++i) {
    uint64_t sum = columns[i];
    for (int64_t row = 0; row < kTogether; ++row) {
      uint64_t word;
      std::memcpy(&word, at + row * kRow + 8 * i, 8);
      sum += word;
    }
    columns[i] = sum;
  }
}

// Eight rows at a time: each column is then read and written once for eight words of the file.
void add_rows(const char* at, int64_t rows, uint64_t* columns) {
  for (; rows >= 8; rows -= 8, at += 8 * kRow) add_together<8>(at, columns);
  for (; rows > 0; --rows, at += kRow) add_together<1>(at, columns);
}

// Fills `view` from byte `offset` of the file; (sums of the whole rows of each block [blocks, 521], bytes that were there).
std::pair<py::array_t<uint64_t>, int64_t> read_columns(const int file, const py::buffer& view, const int64_t offset,
                                                       const int64_t block_bytes) {
  const py::buffer_info memory = view.request(true);
  if (memory.ndim != 1 || memory.itemsize != 1 || block_bytes < 1 || offset < 0) {
    throw std::invalid_argument("view must be bytes, block_bytes positive and offset not negative");
  }
  const int64_t size = memory.size, blocks = (size + block_bytes - 1) / block_bytes;
  py::array_t<uint64_t> sums({blocks, kWords});
  uint64_t* columns = sums.mutable_data();
  char* target = static_cast<char*>(memory.ptr);
  int64_t done = 0;
  int error = 0;
  {
    py::gil_scoped_release release;
    std::fill_n(columns, blocks * kWords, uint64_t{0});
    for (int64_t block = 0; block < blocks && !error; ++block) {
      const int64_t end = std::min(size, (block + 1) * block_bytes);
      while (done < end && !error) {
        const int64_t piece = std::min(kPiece, end - done);
        int64_t there = 0;
        while (there < piece) {
          const ssize_t got = pread(file, target + done + there, piece - there, offset + done + there);
          if (got < 0 && errno == EINTR) continue;
          if (got < 0) error = errno;
          if (got <= 0) break;
          there += got;
        }
        if (there == piece) add_rows(target + done, piece / kRow, columns + block * kWords);
        done += there;
        if (there < piece) break;
      }
      if (done < end) break;
    }
  }
  if (error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return {std::move(sums), done};
}

}  // namespace

PYBIND11_MODULE(read_sums_cpp, m) {
  m.doc() = "Reading with sums; see megatron/checkpoint/checksums.py.";
  m.attr("INTERFACE") = 1;  // raise it here and in checksums.py when the function changes
  m.def("read_columns", &read_columns, py::arg("file"), py::arg("view"), py::arg("offset"), py::arg("block_bytes"));
}
