// The product of vectors with a matrix of codes, for CPUs: `y[v, o] = sum_i x[v, i] * W[o, i]`.
//
// For one vector, numbers are decoded to float32 in registers. For several, the work is done four outputs at a time: a
// chunk of their codes is decoded into the processor's first cache, and multiplied with every vector. So a matrix of
// codes is read once from main memory. A number of W is `(code - zero) * scale`, rounded to float32, as `decode_matrix`
// in _quantized_matmul.py computes it.
//
// If two codes share a byte, the low codes are the even inputs and the high codes the odd ones. The caller passes the
// vectors in the same order: their even inputs, then their odd inputs.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kRows = 4;            // outputs at a time
constexpr int64_t kChunk = 512;     // most bytes of codes of an output at a time
constexpr int64_t kTask = 1 << 16;  // least work of a task, in bytes of codes times vectors

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

enum class Form { kInt8, kInt4, kFp8, kFp4 };

constexpr int parts_of(Form form) { return form == Form::kInt4 || form == Form::kFp4 ? 2 : 1; }

// The zero point of integers that have none of their own: half of the range.
constexpr float middle_of(Form form) { return form == Form::kInt8 ? 128.0f : 8.0f; }

inline Floats load(const float* from) {
  Floats lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(float* to, Floats lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline Floats as_floats(Ints bits) { return (Floats)bits; }

inline Floats to_floats(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

inline Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

// E4M3 without infinities. Subnormal numbers are multiples of 2^-9; 127 and 255 are no numbers.
inline Floats decode_fp8(Ints codes) {
  Ints magnitudes = codes & 127, is_subnormal = magnitudes < 8;
  Ints normal = (magnitudes << 20) + (120 << 23);
  Ints subnormal = (Ints)(to_floats(magnitudes) * 0x1p-9f);
  Ints bits = (is_subnormal & subnormal) | (~is_subnormal & normal) | ((magnitudes == 127) & 0x7fc00000);
  return as_floats(bits | ((codes & 128) << 24));
}

// E2M1. The magnitudes times two are the hex digits of one constant.
inline Floats decode_fp4(Ints codes) {
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  Words digits = (Words{} + 0xC8643210u) >> ((Words)(codes & 7) * 4u);
  Floats magnitudes = to_floats((Ints)(digits & 15u)) * 0.5f;
  return as_floats((Ints)magnitudes | ((codes & 8) << 28));
}

template <Form form>
inline Floats decode(Ints codes, float zero) {
  if constexpr (form == Form::kFp8) return decode_fp8(codes);
  if constexpr (form == Form::kFp4) return decode_fp4(codes);
  return to_floats(codes) - zero;
}

// The numbers of a group are multiplied by `half`, 1/2 or 1, and then by `factor`.
struct Scale {
  float factor, half;
};

// An exponent of 8 bits, `2**(exponent - 127)`. 2^-127 is subnormal, so it is two factors.
inline Scale power_of_two(uint8_t exponent) {
  uint32_t bits = static_cast<uint32_t>(std::max<uint8_t>(exponent, 1)) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return {power, exponent == 0 ? 0.5f : 1.0f};
}

// IEEE half precision. The processor may flush subnormal numbers of float32 to 0, but not those of half precision.
inline float from_half(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  const uint32_t bits = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  if (exponent == 0) magnitude = mantissa * 0x1p-24f;
  return half & 0x8000 ? -magnitude : magnitude;
}

inline float from_bfloat(uint16_t upper_half) {
  const uint32_t bits = static_cast<uint32_t>(upper_half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// The arrays of a call. Of the pointers to scales, and to zero points, the one that fits their dtype is not null.
struct Arrays {
  const float* x;  // vectors, parts, bytes
  const uint8_t* codes;
  const float* scales;
  const uint16_t* half_scales;    // float16
  const uint16_t* bfloat_scales;  // bfloat16
  const uint8_t* exponents;
  const float* zeros;
  const uint8_t* byte_zeros;
  float* y;  // vectors, outputs
  int64_t vectors, outputs, bytes, groups;

  Scale scale(int64_t group) const {
    if (scales != nullptr) return {scales[group], 1.0f};
    if (half_scales != nullptr) return {from_half(half_scales[group]), 1.0f};
    return bfloat_scales != nullptr ? Scale{from_bfloat(bfloat_scales[group]), 1.0f} : power_of_two(exponents[group]);
  }
  float zero(int64_t group, float middle) const {
    return zeros != nullptr ? zeros[group] : byte_zeros != nullptr ? byte_zeros[group] : middle;
  }
};

// Decodes `size` bytes of codes of one group, and passes `use` the part, the place and the numbers of all lanes.
template <Form form, typename Use>
inline void decode_group(const uint8_t* codes, int64_t size, float zero, Scale scale, Use use) {
  auto decode_all = [=](auto scaled) {
    for (int64_t i = 0; i < size; i += kLanes) {
      const Ints bytes = load_bytes(codes + i);
      if constexpr (parts_of(form) == 1) {
        use(0, i, scaled(decode<form>(bytes, zero)));
      } else {
        use(0, i, scaled(decode<form>(bytes & 15, zero)));
        use(1, i, scaled(decode<form>(bytes >> 4, zero)));
      }
    }
  };
  if (scale.half == 1.0f) {
    decode_all([=](Floats numbers) { return numbers * scale.factor; });
  } else {
    decode_all([=](Floats numbers) { return numbers * scale.half * scale.factor; });
  }
}

inline float add_lanes(Floats lanes) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// Computes the outputs from `begin` to `end` for one vector. The decoded numbers stay in registers.
template <Form form>
void multiply_one(const Arrays& a, int64_t begin, int64_t end) {
  const int64_t group_bytes = a.bytes / a.groups;
  for (int64_t output = begin; output < end; ++output) {
    Floats sums[2] = {};
    for (int64_t g = 0; g < a.groups; ++g) {
      const int64_t group = output * a.groups + g, start = g * group_bytes;
      auto add = [&](int part, int64_t i, Floats numbers) {
        sums[part] += numbers * load(a.x + part * a.bytes + start + i);
      };
      const float zero = a.zero(group, middle_of(form));
      decode_group<form>(a.codes + output * a.bytes + start, group_bytes, zero, a.scale(group), add);
    }
    a.y[output] = add_lanes(sums[0] + sums[1]);
  }
}

// Adds the products of `count` vectors and four decoded rows to `sums`, which holds four entries for each vector.
template <int count>
inline void add_products(const float* rows, int64_t row_stride, int64_t size, const float* x, int64_t x_stride,
                         Floats* sums) {
  Floats local[count][kRows];
  std::memcpy(local, sums, sizeof local);
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats inputs[count];
    for (int v = 0; v < count; ++v) inputs[v] = load(x + v * x_stride + i);
    for (int r = 0; r < kRows; ++r) {
      Floats numbers = load(rows + r * row_stride + i);
      for (int v = 0; v < count; ++v) local[v][r] += numbers * inputs[v];
    }
  }
  std::memcpy(sums, local, sizeof local);
}

// Computes the outputs from `begin` to `end` for all vectors, from numbers in the processor's first cache.
template <Form form>
void multiply(const Arrays& a, int64_t begin, int64_t end) {
  constexpr int parts = parts_of(form);
  const int64_t group_bytes = a.bytes / a.groups;
  // A chunk is several whole groups, or a part of one group.
  const int64_t chunk = group_bytes > kChunk ? kChunk : kChunk / group_bytes * group_bytes;
  alignas(64) float decoded[kRows][parts][kChunk] = {};
  std::vector<Floats> sums(a.vectors * kRows);
  for (int64_t output = begin; output < end; output += kRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kRows, end - output));
    std::fill(sums.begin(), sums.end(), Floats{});
    for (int64_t start = 0, size; start < a.bytes; start += size) {
      size = std::min(chunk, a.bytes - start);
      if (group_bytes > kChunk) size = std::min(size, group_bytes - start % group_bytes);
      const int64_t piece = std::min(size, group_bytes);
      for (int r = 0; r < rows; ++r) {
        int64_t group = (output + r) * a.groups + start / group_bytes;
        const uint8_t* codes = a.codes + (output + r) * a.bytes + start;
        for (int64_t i = 0; i < size; i += piece, ++group) {
          auto keep = [&](int part, int64_t j, Floats numbers) { store(&decoded[r][part][i + j], numbers); };
          decode_group<form>(codes + i, piece, a.zero(group, middle_of(form)), a.scale(group), keep);
        }
      }
      for (int part = 0; part < parts; ++part) {
        const float* x = a.x + part * a.bytes + start;
        const int64_t stride = parts * a.bytes;
        int64_t v = 0;
        for (; v + 4 <= a.vectors; v += 4)
          add_products<4>(decoded[0][part], parts * kChunk, size, x + v * stride, stride, &sums[v * kRows]);
        for (; v < a.vectors; ++v)
          add_products<1>(decoded[0][part], parts * kChunk, size, x + v * stride, stride, &sums[v * kRows]);
      }
    }
    for (int64_t v = 0; v < a.vectors; ++v) {
      for (int r = 0; r < rows; ++r) {
        a.y[v * a.outputs + output + r] = add_lanes(sums[v * kRows + r]);
      }
    }
  }
}

// Tasks of a call, which threads take one by one.
struct Tasks {
  std::atomic<int64_t> next{0};
  int64_t done = 0;
  std::mutex mutex;
  std::condition_variable all_done;
};

// Runs `work(task)` for each task on XLA's threads. The calling thread takes tasks too and waits only for tasks that
// another thread has begun: if all threads are busy, or wait themselves, it does everything alone.
template <typename Work>
void run_tasks(ffi::ThreadPool pool, int64_t count, const Work& work) {
  auto tasks = std::make_shared<Tasks>();
  auto take = [tasks, count, &work] {
    for (int64_t task; (task = tasks->next++) < count;) {
      work(task);
      std::lock_guard<std::mutex> lock(tasks->mutex);
      if (++tasks->done == count) tasks->all_done.notify_all();
    }
  };
  const int64_t threads = std::min(count, pool.num_threads());
  for (int64_t helper = 1; helper < threads; ++helper) pool.Schedule([take] { take(); });
  take();
  std::unique_lock<std::mutex> lock(tasks->mutex);
  tasks->all_done.wait(lock, [&] { return tasks->done == count; });
}

using Vectors = ffi::Buffer<ffi::F32, 3>;
using Codes = ffi::Buffer<ffi::U8, 2>;
using Products = ffi::Buffer<ffi::F32, 2>;

ffi::Error run(ffi::ThreadPool pool, Vectors x, Codes codes, ffi::AnyBuffer scales, ffi::AnyBuffer zeros,
               ffi::Result<Products> y, std::string_view form) {
  Arrays a = {};
  a.x = x.typed_data(), a.codes = codes.typed_data(), a.y = y->typed_data();
  a.vectors = x.dimensions()[0], a.outputs = codes.dimensions()[0], a.bytes = codes.dimensions()[1];
  a.groups = scales.dimensions()[1];
  if (a.vectors * a.outputs == 0) return ffi::Error::Success();
  const void *scale_data = scales.untyped_data(), *zero_data = zeros.untyped_data();
  switch (scales.element_type()) {
    case ffi::F32: a.scales = static_cast<const float*>(scale_data); break;
    case ffi::F16: a.half_scales = static_cast<const uint16_t*>(scale_data); break;
    case ffi::BF16: a.bfloat_scales = static_cast<const uint16_t*>(scale_data); break;
    case ffi::U8: a.exponents = static_cast<const uint8_t*>(scale_data); break;
    default: return ffi::Error::InvalidArgument("scales must be float32, float16, bfloat16 or uint8");
  }
  if (zeros.element_count() > 0) {
    if (zeros.element_type() == ffi::F32) a.zeros = static_cast<const float*>(zero_data);
    else if (zeros.element_type() == ffi::U8) a.byte_zeros = static_cast<const uint8_t*>(zero_data);
    else return ffi::Error::InvalidArgument("zero points must be float32 or uint8");
  }
  auto choose = [&](auto one, auto many) { return a.vectors == 1 ? one : many; };
  auto multiply_form = form == "int8"   ? choose(multiply_one<Form::kInt8>, multiply<Form::kInt8>)
                       : form == "int4" ? choose(multiply_one<Form::kInt4>, multiply<Form::kInt4>)
                       : form == "fp8"  ? choose(multiply_one<Form::kFp8>, multiply<Form::kFp8>)
                                        : choose(multiply_one<Form::kFp4>, multiply<Form::kFp4>);
  const int64_t blocks = (a.outputs + kRows - 1) / kRows;
  const int64_t max_tasks = a.outputs * a.bytes * a.vectors / kTask;
  const int64_t tasks = std::max<int64_t>(1, std::min({4 * pool.num_threads(), blocks, max_tasks}));
  run_tasks(pool, tasks, [&](int64_t task) {
    const int64_t begin = blocks * task / tasks * kRows, end = blocks * (task + 1) / tasks * kRows;
    multiply_form(a, begin, std::min(end, a.outputs));
  });
  return ffi::Error::Success();
}

}  // namespace

// Without zero points, `zeros` is empty.
XLA_FFI_DEFINE_HANDLER_SYMBOL(quantized_matmul, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Vectors>()
                                  .Arg<Codes>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Products>()
                                  .Attr<std::string_view>("form"));
