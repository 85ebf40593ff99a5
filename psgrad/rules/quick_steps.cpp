// The loops over time of recurrent layers, as psgrad/rules/steps.py has them in torch's ops.
//
// Sequences do not depend on each other. So each thread takes some of them through all steps, and nobody waits for
// anybody else at a step. Weights are laid out once for all steps, in the order in which products read them.

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace {

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename T>
constexpr int64_t lanes = Vec<T>::size();

// A matrix (K, N) to multiply with, in panels of some columns.
template <typename T>
class Weight {
 public:
  Weight(const T* from, int64_t k, int64_t n, int64_t row_stride, int64_t column_stride)
      : k(k), n(n), panels((n + columns - 1) / columns),
        numbers(static_cast<T*>(::operator new(sizeof(T) * panels * k * columns, alignment))) {
    for (int64_t p = 0; p < panels; p++)
      for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; j < columns; j++) {
          const int64_t column = p * columns + j;
          numbers[(p * k + i) * columns + j] = column < n ? from[i * row_stride + column * column_stride] : T(0);
        }
  }
  Weight(const Weight&) = delete;
  ~Weight() { ::operator delete(numbers, alignment); }

  // Adds a (rows, K) times the matrix to c, whose rows are `stride` apart.
  void add_product(const T* a, T* c, int64_t stride, int64_t rows) const {
    for (int64_t p = 0; p < panels; p++) {
      int64_t r = 0;
      for (; r + most_rows <= rows; r += most_rows) add_tile<most_rows>(a + r * k, c + r * stride, stride, p);
      for (; r + 4 <= rows; r += 4) add_tile<4>(a + r * k, c + r * stride, stride, p);
      for (; r < rows; r++) add_tile<1>(a + r * k, c + r * stride, stride, p);
    }
  }

 private:
  // The sums of a tile, a row of a panel and a number fit the processor's registers: 16 where they have 32 bytes.
  static constexpr int vectors = 2, most_rows = sizeof(Vec<T>) == 32 ? 6 : 8;
  static constexpr int64_t columns = vectors * lanes<T>;
  static constexpr std::align_val_t alignment{64};
  const int64_t k, n, panels;
  T* const numbers;

  template <int R>
  void add_tile(const T* a, T* c, int64_t stride, int64_t panel) const {
    Vec<T> sums[R][vectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < vectors; v++) sums[r][v] = Vec<T>(T(0));
    const T* b = numbers + panel * k * columns;
    for (int64_t i = 0; i < k; i++, b += columns) {
      Vec<T> row[vectors];
      for (int v = 0; v < vectors; v++) row[v] = Vec<T>::loadu(b + v * lanes<T>);
      for (int r = 0; r < R; r++) {
        const Vec<T> x(a[r * k + i]);
        for (int v = 0; v < vectors; v++) sums[r][v] = at::vec::fmadd(x, row[v], sums[r][v]);
      }
    }
    for (int v = 0; v < vectors; v++) {
      const int64_t first = panel * columns + v * lanes<T>, count = std::min(lanes<T>, n - first);
      if (count <= 0) break;
      for (int r = 0; r < R; r++) {
        T* to = c + r * stride + first;
        (Vec<T>::loadu(to, count) + sums[r][v]).store(to, count);
      }
    }
  }
};

// (L, rows, width), some threads, and which way the steps go.
struct Loop {
  int64_t length, rows, width, threads;
  bool reverse, relu;

  // Calls body(t, before, after, begin, end): a step, where the states before and after it are, and some rows.
  template <typename Body>
  void run(bool back, const Body& body) const {
    const int64_t each = std::max<int64_t>((rows + threads - 1) / threads, 4);  // each thread reads the whole weight
    const int64_t parts = (rows + each - 1) / each;
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int64_t part = 0; part < parts; part++)
      for (int64_t step = 0; step < length; step++) {
        const int64_t t = reverse != back ? length - 1 - step : step;
        body(t, t + reverse, t + !reverse, part * each, std::min(rows, (part + 1) * each));
      }
  }

  // Calls body(j, count) for each vector of a row.
  template <typename T, typename Body>
  void along(const Body& body) const {
    for (int64_t j = 0; j < width; j += lanes<T>) body(j, std::min(lanes<T>, width - j));
  }
};

template <typename T>
Vec<T> sigmoid(Vec<T> x) {
  return (Vec<T>(T(1)) + x.neg().exp()).reciprocal();
}

template <typename T>
Vec<T> of_sigmoid(Vec<T> y) {
  return y * (Vec<T>(T(1)) - y);
}

template <typename T>
Vec<T> of_tanh(Vec<T> y) {
  return Vec<T>(T(1)) - y * y;
}

template <typename T>
void lstm(T* const* tensors, const Loop& loop) {
  T *gates = tensors[0], *h = tensors[1], *c = tensors[2], *w_hh = tensors[3];
  T *update = tensors[4], *squashed = tensors[5];
  const int64_t width = loop.width, rows = loop.rows;
  const Weight<T> weight(w_hh, width, 4 * width, 1, width);
  loop.run(false, [&](int64_t t, int64_t before, int64_t after, int64_t begin, int64_t end) {
    T* gate = gates + (t * rows + begin) * 4 * width;
    weight.add_product(h + (before * rows + begin) * width, gate, 4 * width, end - begin);
    for (int64_t n = begin; n < end; n++, gate += 4 * width) {
      const int64_t here = (t * rows + n) * width, from = (before * rows + n) * width, to = (after * rows + n) * width;
      loop.along<T>([&](int64_t j, int64_t count) {
        const auto load = [=](const T* p) { return Vec<T>::loadu(p + j, count); };
        const Vec<T> i = sigmoid(load(gate)), f = sigmoid(load(gate + width)), o = sigmoid(load(gate + 3 * width));
        const Vec<T> u = load(gate + 2 * width).tanh(), cell = f * load(c + from) + i * u, s = cell.tanh();
        i.store(gate + j, count);
        f.store(gate + width + j, count);
        o.store(gate + 3 * width + j, count);
        u.store(update + here + j, count);
        s.store(squashed + here + j, count);
        cell.store(c + to + j, count);
        (o * s).store(h + to + j, count);
      });
    }
  });
}

template <typename T>
void lstm_back(T* const* tensors, const Loop& loop) {
  T *dh = tensors[0], *dc = tensors[1], *gates = tensors[2], *c = tensors[3];
  T *update = tensors[4], *squashed = tensors[5], *w_hh = tensors[6], *d = tensors[7];
  const int64_t width = loop.width, rows = loop.rows;
  const Weight<T> weight(w_hh, 4 * width, width, width, 1);
  loop.run(true, [&](int64_t t, int64_t before, int64_t after, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const int64_t here = (t * rows + n) * width, from = (before * rows + n) * width, to = (after * rows + n) * width;
      const T* gate = gates + 4 * here;
      T *by_gate = d + 4 * here, *by_cell = dc + n * width;
      loop.along<T>([&](int64_t j, int64_t count) {
        const auto load = [=](const T* p) { return Vec<T>::loadu(p + j, count); };
        const Vec<T> i = load(gate), f = load(gate + width), o = load(gate + 3 * width), u = load(update + here);
        const Vec<T> s = load(squashed + here), out = load(dh + to), cell = load(by_cell) + out * (o * of_tanh(s));
        (cell * (u * of_sigmoid(i))).store(by_gate + j, count);
        (cell * (load(c + from) * of_sigmoid(f))).store(by_gate + width + j, count);
        (cell * (i * of_tanh(u))).store(by_gate + 2 * width + j, count);
        (out * (s * of_sigmoid(o))).store(by_gate + 3 * width + j, count);
        (cell * f).store(by_cell + j, count);
      });
    }
    weight.add_product(d + (t * rows + begin) * 4 * width, dh + (before * rows + begin) * width, width, end - begin);
  });
}

template <typename T>
void gru(T* const* tensors, const Loop& loop) {
  T *gates = tensors[0], *h = tensors[1], *inner = tensors[2], *w_hh = tensors[3], *update = tensors[4];
  const int64_t width = loop.width, rows = loop.rows;
  const Weight<T> both(w_hh, width, 2 * width, 1, width), last(w_hh + 2 * width * width, width, width, 1, width);
  loop.run(false, [&](int64_t t, int64_t before, int64_t after, int64_t begin, int64_t end) {
    const T* state = h + (before * rows + begin) * width;
    T* gate = gates + (t * rows + begin) * 3 * width;
    both.add_product(state, gate, 3 * width, end - begin);
    last.add_product(state, inner + (t * rows + begin) * width, width, end - begin);
    for (int64_t n = begin; n < end; n++, gate += 3 * width) {
      const int64_t here = (t * rows + n) * width, from = (before * rows + n) * width, to = (after * rows + n) * width;
      loop.along<T>([&](int64_t j, int64_t count) {
        const auto load = [=](const T* p) { return Vec<T>::loadu(p + j, count); };
        const Vec<T> r = sigmoid(load(gate)), z = sigmoid(load(gate + width));
        const Vec<T> u = (load(gate + 2 * width) + r * load(inner + here)).tanh();
        r.store(gate + j, count);
        z.store(gate + width + j, count);
        u.store(update + here + j, count);
        (u + z * (load(h + from) - u)).store(h + to + j, count);
      });
    }
  });
}

template <typename T>
void gru_back(T* const* tensors, const Loop& loop) {
  T *dh = tensors[0], *gates = tensors[1], *h = tensors[2], *update = tensors[3];
  T *inner = tensors[4], *w_hh = tensors[5], *of_x = tensors[6], *of_h = tensors[7];
  const int64_t width = loop.width, rows = loop.rows;
  const Weight<T> weight(w_hh, 3 * width, width, width, 1);
  loop.run(true, [&](int64_t t, int64_t before, int64_t after, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const int64_t here = (t * rows + n) * width, from = (before * rows + n) * width, to = (after * rows + n) * width;
      const T* gate = gates + 3 * here;
      T *by_x = of_x + 3 * here, *by_h = of_h + 3 * here;
      loop.along<T>([&](int64_t j, int64_t count) {
        const auto load = [=](const T* p) { return Vec<T>::loadu(p + j, count); };
        const Vec<T> r = load(gate), z = load(gate + width), u = load(update + here), out = load(dh + to);
        const Vec<T> raw = (Vec<T>(T(1)) - z) * of_tanh(u), of_r = out * (raw * load(inner + here) * of_sigmoid(r));
        const Vec<T> of_z = out * ((load(h + from) - u) * of_sigmoid(z));
        for (T* by : {by_x, by_h}) {
          of_r.store(by + j, count);
          of_z.store(by + width + j, count);
        }
        (out * raw).store(by_x + 2 * width + j, count);
        (out * (raw * r)).store(by_h + 2 * width + j, count);
        (load(dh + from) + out * z).store(dh + from + j, count);
      });
    }
    weight.add_product(of_h + (t * rows + begin) * 3 * width, dh + (before * rows + begin) * width, width, end - begin);
  });
}

template <typename T>
void rnn(T* const* tensors, const Loop& loop) {
  T *h = tensors[0], *w_hh = tensors[1];
  const int64_t width = loop.width, rows = loop.rows;
  const Weight<T> weight(w_hh, width, width, 1, width);
  loop.run(false, [&](int64_t, int64_t before, int64_t after, int64_t begin, int64_t end) {
    T* state = h + (after * rows + begin) * width;
    weight.add_product(h + (before * rows + begin) * width, state, width, end - begin);
    for (int64_t n = begin; n < end; n++, state += width)
      loop.along<T>([&](int64_t j, int64_t count) {
        const Vec<T> x = Vec<T>::loadu(state + j, count);
        (loop.relu ? at::vec::maximum(x, Vec<T>(T(0))) : x.tanh()).store(state + j, count);
      });
  });
}

template <typename T>
void rnn_back(T* const* tensors, const Loop& loop) {
  T *dh = tensors[0], *h = tensors[1], *w_hh = tensors[2];
  const int64_t width = loop.width, rows = loop.rows;
  const Weight<T> weight(w_hh, width, width, width, 1);
  const Vec<T> zero(T(0)), one(T(1));
  loop.run(true, [&](int64_t, int64_t before, int64_t after, int64_t begin, int64_t end) {
    const int64_t at = (after * rows + begin) * width;
    for (int64_t n = 0; n < end - begin; n++) {
      const T* state = h + at + n * width;
      T* by = dh + at + n * width;
      loop.along<T>([&](int64_t j, int64_t count) {
        const Vec<T> y = Vec<T>::loadu(state + j, count);
        const Vec<T> local = loop.relu ? Vec<T>::blendv(one, zero, y <= zero) : of_tanh(y);
        (Vec<T>::loadu(by + j, count) * local).store(by + j, count);
      });
    }
    weight.add_product(dh + at, dh + (before * rows + begin) * width, width, end - begin);
  });
}

}  // namespace

#ifdef _WIN32
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C"
#endif
#define EXPORT_AS(name, T)                                                                         \
  EXPORTED void name##_##T(T* const* tensors, const int64_t* sizes) {                              \
    name(tensors, Loop{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0});     \
  }
#define EXPORT(name) EXPORT_AS(name, float) EXPORT_AS(name, double)
EXPORT(lstm)
EXPORT(lstm_back)
EXPORT(gru)
EXPORT(gru_back)
EXPORT(rnn)
EXPORT(rnn_back)
