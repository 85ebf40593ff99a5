// Per-sample gradients of the weights of convolutions and of matrices, or their norms.
//
// The gradient of a sample is a sum over positions t: of x[r, t] g[o, t] for each output o and each row r, which is an
// input and, of a convolution, a tap of its kernel. Outputs lie side by side in vectors, and each number of x is
// multiplied with them where it stands: nothing is laid out for the windows that a kernel sees. A block of the result is
// written out, or only squared, while it is in the cache. Samples are shared out between threads.

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t lanes = Vec::size();

// A tile's sums, a vector of outputs and a number fit the processor's registers: 16 where they have 32 bytes, else 32.
constexpr int sums_held = sizeof(Vec) == 32 ? 12 : 24;
constexpr int most_vectors = sizeof(Vec) == 32 ? 2 : 4;
constexpr int64_t block = 48;       // rows of a block of the result
constexpr int64_t added_up = 2048;  // positions; longer sums of float32 would lose digits

struct Room {
  explicit Room(int64_t count)
      : numbers(static_cast<float*>(::operator new(sizeof(float) * std::max<int64_t>(count, 1), alignment))) {
    std::memset(numbers, 0, sizeof(float) * count);
  }
  Room(const Room&) = delete;
  ~Room() { ::operator delete(numbers, alignment); }
  static constexpr std::align_val_t alignment{64};
  float* const numbers;
};

// Positions that are a step apart in memory, behind `at`. With the last of a sum it is added to those before it.
struct Run {
  int64_t at, count;
  bool ends;
};

// The rows and positions of each sample: a row's numbers are at its offset plus those of the positions.
struct Terms {
  const int64_t step;
  const bool in_threes;  // three rows in turn are neighbours in memory
  std::vector<int64_t> rows;
  std::vector<Run> runs;
  int64_t positions = 0, pending = 0;

  Terms(int64_t step, bool in_threes) : step(step), in_threes(in_threes) {}

  // Adds positions, those of a long row in parts.
  void add(int64_t at, int64_t count) {
    while (count > 0) {
      const int64_t some = std::min(count, added_up);
      if (pending + some > added_up) runs.back().ends = true, pending = 0;
      runs.push_back({at, some, false});
      pending += some, positions += some, at += some * step, count -= some;
    }
  }

  void end() {
    if (!runs.empty()) runs.back().ends = true;
  }
};

// Sums for R rows and V vectors of outputs; Q rows in turn share a pointer.
template <int R, int V, int Q>
void add_up(const float* x, const int64_t* rows, const float* g, const Terms& terms, float* out) {
  const float* from[R / Q];
  for (int r = 0; r < R / Q; r++) from[r] = x + rows[r * Q];
  bool is_first = true;
  Vec sums[R][V];
#pragma GCC unroll 24
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = Vec(0.f);
  for (const Run& run : terms.runs) {
    int64_t at = run.at;
    for (int64_t t = 0; t < run.count; t++, at += terms.step, g += V * lanes) {
      Vec y[V];
      for (int v = 0; v < V; v++) y[v] = Vec::loadu(g + v * lanes);
#pragma GCC unroll 24
      for (int r = 0; r < R; r++) {
        const Vec number(from[r / Q][at + r % Q]);
        for (int v = 0; v < V; v++) sums[r][v] = at::vec::fmadd(number, y[v], sums[r][v]);
      }
    }
    if (!run.ends) continue;
#pragma GCC unroll 24
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) {
        float* to = out + (r * V + v) * lanes;
        (is_first ? sums[r][v] : Vec::loadu(to) + sums[r][v]).store(to);
        sums[r][v] = Vec(0.f);
      }
    is_first = false;
  }
}

template <int V, int Q>
void fill_block(const float* x, const int64_t* rows, int64_t count, const float* g, const Terms& terms, float* out) {
  constexpr int R = V < 3 ? sums_held / V : 6;
  int64_t r = 0;
  for (; r + R <= count; r += R) add_up<R, V, Q>(x, rows + r, g, terms, out + r * V * lanes);
  for (; r + 3 <= count; r += 3) add_up<3, V, Q>(x, rows + r, g, terms, out + r * V * lanes);
  for (; r < count; r++) add_up<1, V, 1>(x, rows + r, g, terms, out + r * V * lanes);
}

template <int V>
auto filler(bool in_threes) {
  return in_threes ? fill_block<V, 3> : fill_block<V, 1>;
}

// Writes a matrix with its axes swapped.
void turn(const float* from, int64_t row, float* to, int64_t to_row, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t c = 0; c < columns; c += lanes) {
      const float* f = from + r * row + c;
      float* t = to + c * to_row + r;
      if (r + lanes <= rows && c + lanes <= columns) {
        at::vec::transpose_mxn<float, lanes, lanes>(f, row, t, to_row);
        continue;
      }
      for (int64_t i = 0; i < std::min(lanes, rows - r); i++)
        for (int64_t j = 0; j < std::min(lanes, columns - c); j++) t[j * to_row + i] = f[i * row + j];
    }
}

// Gradients (samples, outputs, rows), or norms (samples,): of what `from` says of each sample.
template <typename From>
void gradients(const From& from, const Terms& terms, int64_t samples, int64_t outputs, int64_t threads, bool norms,
               float* result) {
  const int64_t rows = terms.rows.size();
#pragma omp parallel num_threads(std::max<int64_t>(std::min(threads, samples), 1))
  {
    Room inputs(from.room()), cotangents(terms.positions * most_vectors * lanes), sums(block * most_vectors * lanes);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < samples; n++) {
      double squares[lanes] = {0};
      const float* x = from.inputs(n, inputs.numbers);
      for (int64_t first = 0; first < outputs; first += most_vectors * lanes) {
        const int64_t some = std::min(most_vectors * lanes, outputs - first), v = (some + lanes - 1) / lanes;
        from.cotangents(n, first, some, cotangents.numbers, v * lanes);
        const auto fill = v == 1   ? filler<1>(terms.in_threes)
                          : v == 2 ? filler<2>(terms.in_threes)
                          : v == 3 ? filler<3>(terms.in_threes)
                                   : filler<4>(terms.in_threes);
        for (int64_t r = 0; r < rows; r += block) {
          const int64_t count = std::min(block, rows - r);
          fill(x, terms.rows.data() + r, count, cotangents.numbers, terms, sums.numbers);
          if (norms) {
            for (int64_t i = 0; i < count * v * lanes; i += lanes)
              for (int64_t l = 0; l < lanes; l++)
                squares[l] += static_cast<double>(sums.numbers[i + l]) * sums.numbers[i + l];
          } else {
            turn(sums.numbers, v * lanes, result + (n * outputs + first) * rows + r, rows, count, some);
          }
        }
      }
      if (!norms) continue;
      double total = 0;  // of float32 numbers squared in float64: none leaves its range
      for (const double each : squares) total += each;
      result[n] = static_cast<float>(std::sqrt(total));
    }
  }
}

// x (N, B, C, *S) and g (N, B, O, *S') with three spatial axes, of one group.
struct Convolution {
  int64_t images, channels, outputs, in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
  const float *x, *g;

  int64_t padded(int axis) const { return in[axis] + 2 * padding[axis]; }
  int64_t plane() const { return padded(0) * padded(1) * padded(2); }
  int64_t room() const { return images * channels * plane(); }

  Terms terms() const {
    Terms found(stride[2], kernel[2] % 3 == 0 && dilation[2] == 1);
    const int64_t row = padded(2), sheet = padded(1) * row;
    for (int64_t c = 0; c < channels; c++)
      for (int64_t i = 0; i < kernel[0]; i++)
        for (int64_t j = 0; j < kernel[1]; j++)
          for (int64_t k = 0; k < kernel[2]; k++)
            found.rows.push_back(c * plane() + i * dilation[0] * sheet + j * dilation[1] * row + k * dilation[2]);
    for (int64_t b = 0; b < images; b++)
      for (int64_t i = 0; i < out[0]; i++)
        for (int64_t j = 0; j < out[1]; j++)
          found.add(b * channels * plane() + i * stride[0] * sheet + j * stride[1] * row, out[2]);
    found.end();
    return found;
  }

  // A sample's input with zeros around it.
  const float* inputs(int64_t n, float* to) const {
    const float* from = x + n * images * channels * in[0] * in[1] * in[2];
    for (int64_t bc = 0; bc < images * channels; bc++)
      for (int64_t i = 0; i < in[0]; i++)
        for (int64_t j = 0; j < in[1]; j++, from += in[2]) {
          const int64_t line = (bc * padded(0) + i + padding[0]) * padded(1) + j + padding[1];
          std::memcpy(to + line * padded(2) + padding[2], from, sizeof(float) * in[2]);
        }
    return to;
  }

  // Some outputs of a sample, those of a position side by side.
  void cotangents(int64_t n, int64_t first, int64_t some, float* to, int64_t width) const {
    const int64_t size = out[0] * out[1] * out[2];
    if (some < width) std::memset(to, 0, sizeof(float) * images * size * width);
    for (int64_t b = 0; b < images; b++)
      turn(g + ((n * images + b) * outputs + first) * size, size, to + b * size * width, width, some, size);
  }
};

// x (N, T, I) and g (N, T, O).
struct Matrix {
  int64_t positions, width, outputs;
  const float *x, *g;

  int64_t room() const { return 0; }

  Terms terms() const {
    Terms found(width, true);
    for (int64_t i = 0; i < width; i++) found.rows.push_back(i);
    found.add(0, positions);
    found.end();
    return found;
  }

  const float* inputs(int64_t n, float*) const { return x + n * positions * width; }

  void cotangents(int64_t n, int64_t first, int64_t some, float* to, int64_t columns) const {
    if (some < columns) std::memset(to, 0, sizeof(float) * positions * columns);
    for (int64_t t = 0; t < positions; t++)
      std::memcpy(to + t * columns, g + (n * positions + t) * outputs + first, sizeof(float) * some);
  }
};

}  // namespace

#ifdef _WIN32
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C"
#endif

// Tensors x, g, result; numbers: threads, whether norms are asked for, samples, sizes.
EXPORTED void convolution_float(float* const* tensors, const int64_t* numbers) {
  Convolution from;
  std::memcpy(&from, numbers + 3, sizeof(int64_t) * 21);
  from.x = tensors[0], from.g = tensors[1];
  gradients(from, from.terms(), numbers[2], from.outputs, numbers[0], numbers[1] != 0, tensors[2]);
}

EXPORTED void matrix_float(float* const* tensors, const int64_t* numbers) {
  Matrix from{numbers[3], numbers[4], numbers[5], tensors[0], tensors[1]};
  gradients(from, from.terms(), numbers[2], from.outputs, numbers[0], numbers[1] != 0, tensors[2]);
}
