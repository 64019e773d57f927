// Sample index and blending for megatron/data/index_helpers.py, whose numpy twins define the same answers.
// It fills arrays that its caller made and checked; no files, splits or seeds. No thread holds the GIL here.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

// A product and a difference must round twice, as in numpy: with a fused multiply-add (the default of gcc where the
// processor has one) ties fall differently and the same command would read other data on another machine.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t kAhead = 24;  // how far the lengths of shuffled documents are fetched ahead

// Row r of `rows` [n + 1, 2] is the position of token r * sequence_length: (place in `documents`, offset in that document).
template <typename Document, typename Row>
void fill_sample_index(const Array<int32_t>& lengths, const Array<Document>& documents, const int64_t sequence_length,
                       Array<Row>& rows) {
  if (rows.ndim() != 2 || rows.shape(0) < 1 || rows.shape(1) != 2 || sequence_length < 1) {
    throw std::invalid_argument("rows must have shape [n + 1, 2] and sequence_length must be positive");
  }
  const int64_t known = lengths.size(), entries = documents.size(), last = rows.shape(0) - 1;
  const int32_t* length = lengths.data();
  const Document* document = documents.data();
  Row* row = rows.mutable_data();
  py::gil_scoped_release release;
  row[0] = row[1] = 0;
  int64_t start = 0, next = 1, wanted = sequence_length;
  for (int64_t place = 0; next <= last; ++place) {
    if (place >= entries) throw std::invalid_argument("the documents have fewer tokens than the samples need");
#if defined(__GNUC__)
    if (place + kAhead < entries) __builtin_prefetch(length + document[place + kAhead]);
#endif
    if (document[place] < 0 || document[place] >= known) throw std::invalid_argument("a document has no length");
    const int64_t end = start + length[document[place]];
    for (; next <= last && wanted < end; ++next, wanted += sequence_length) {
      row[2 * next] = static_cast<Row>(place);
      row[2 * next + 1] = static_cast<Row>(wanted - start);
    }
    start = end;
  }
}

// Sample i comes from the first dataset whose share so far lags most: weight * max(i, 1) - taken.
// With `limit`, a dataset that has given limit[d] samples gives no more.
template <typename Id>
void fill_greedy(const std::vector<double>& weights, const int64_t* limit, const int64_t size, Id* dataset,
                 int64_t* sample) {
  const int64_t count = static_cast<int64_t>(weights.size());
  std::vector<int64_t> taken(weights.size(), 0), open(weights.size());
  for (int64_t d = 0; d < count; ++d) open[d] = d;
  if (limit) open.erase(std::remove_if(open.begin(), open.end(), [&](int64_t d) { return limit[d] <= 0; }), open.end());
  for (int64_t i = 0; i < size; ++i) {
    const double position = static_cast<double>(std::max<int64_t>(i, 1));
    double most = -std::numeric_limits<double>::infinity();
    int64_t chosen = -1;
    for (const int64_t d : open) {
      const double lag = weights[d] * position - static_cast<double>(taken[d]);
      if (lag > most) {
        most = lag;
        chosen = d;
      }
    }
    if (chosen < 0) throw std::invalid_argument("no dataset is left to draw from");
    dataset[i] = static_cast<Id>(chosen);
    sample[i] = taken[chosen]++;
    if (limit && taken[chosen] == limit[chosen]) open.erase(std::find(open.begin(), open.end(), chosen));
  }
}

template <typename Id>
void check_blend(const int64_t datasets, const Array<Id>& dataset_index, const Array<int64_t>& sample_index) {
  if (datasets < 1 || datasets > std::numeric_limits<Id>::max() || dataset_index.size() != sample_index.size()) {
    throw std::invalid_argument("a blend needs at least one dataset, ids that hold them and two index arrays of one size");
  }
}

template <typename Id>
void fill_blending(const Array<double>& weights, Array<Id>& dataset_index, Array<int64_t>& sample_index) {
  check_blend(weights.size(), dataset_index, sample_index);
  const std::vector<double> share(weights.data(), weights.data() + weights.size());
  Id* dataset = dataset_index.mutable_data();
  int64_t* sample = sample_index.mutable_data();
  const int64_t size = dataset_index.size();
  py::gil_scoped_release release;
  fill_greedy(share, nullptr, size, dataset, sample);
}

template <typename Id>
void fill_exhaustive_blending(const Array<int64_t>& sizes, Array<Id>& dataset_index, Array<int64_t>& sample_index) {
  check_blend(sizes.size(), dataset_index, sample_index);
  const int64_t* limit = sizes.data();
  Id* dataset = dataset_index.mutable_data();
  int64_t* sample = sample_index.mutable_data();
  const int64_t size = dataset_index.size();
  std::vector<double> share(sizes.size());
  for (size_t d = 0; d < share.size(); ++d) {
    share[d] = static_cast<double>(limit[d]) / static_cast<double>(size);
  }
  py::gil_scoped_release release;
  fill_greedy(share, limit, size, dataset, sample);
}

// The swaps of numpy's RandomState.shuffle from entry `left` down, as far as the 32-bit numbers `raw` go: (the entry to continue
// with, numbers used). Partners are drawn some time before the swap, so that the memory has time to bring them.
template <typename T>
std::pair<int64_t, int64_t> shuffle(Array<T>& values, int64_t left, const Array<uint32_t>& raw) {
  if (left >= values.size() || left > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("there is no such entry to shuffle");
  }
  T* value = values.mutable_data();
  const uint32_t* number = raw.data();
  const int64_t count = raw.size();
  py::gil_scoped_release release;
  std::vector<uint32_t> partners;
  partners.reserve(count);
  uint32_t mask = 1;
  while (mask < left) mask = mask << 1 | 1;
  int64_t used = 0, next = left;
  while (next > 0 && used < count) {
    if ((mask >> 1) >= next) mask >>= 1;
    const uint32_t drawn = number[used++] & mask;
    if (drawn > next) continue;
    partners.push_back(drawn);
    --next;
  }
  const int64_t swaps = static_cast<int64_t>(partners.size());
  for (int64_t i = 0; i < swaps; ++i) {
#if defined(__GNUC__)
    if (i + kAhead < swaps) __builtin_prefetch(value + partners[i + kAhead], 1);
#endif
    std::swap(value[left - i], value[partners[i]]);
  }
  return {next, used};
}

template <typename T>
void define_shuffle(py::module_& m) {
  m.def("shuffle", &shuffle<T>, py::arg("values").noconvert(), py::arg("left"), py::arg("raw").noconvert());
}

template <typename Document, typename Row>
void define_sample_index(py::module_& m) {
  m.def("fill_sample_index", &fill_sample_index<Document, Row>, py::arg("lengths").noconvert(),
        py::arg("documents").noconvert(), py::arg("sequence_length"), py::arg("rows").noconvert());
}

template <typename Id>
void define_blending(py::module_& m) {
  m.def("fill_blending", &fill_blending<Id>, py::arg("weights").noconvert(), py::arg("dataset_index").noconvert(),
        py::arg("sample_index").noconvert());
  m.def("fill_exhaustive_blending", &fill_exhaustive_blending<Id>, py::arg("sizes").noconvert(),
        py::arg("dataset_index").noconvert(), py::arg("sample_index").noconvert());
}

}  // namespace

PYBIND11_MODULE(helpers_cpp, m) {
  m.doc() = "Sample index and blending; see megatron/data/index_helpers.py.";
  m.attr("INTERFACE") = 3;  // raise it here and in index_helpers.py when a function changes
  define_sample_index<int32_t, int32_t>(m);
  define_sample_index<int32_t, int64_t>(m);
  define_sample_index<int64_t, int32_t>(m);
  define_sample_index<int64_t, int64_t>(m);
  define_shuffle<int32_t>(m);
  define_shuffle<uint32_t>(m);
  define_shuffle<int64_t>(m);
  define_blending<int16_t>(m);
  define_blending<int32_t>(m);
}
