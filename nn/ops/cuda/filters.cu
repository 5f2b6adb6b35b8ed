#include "nn/ops/cuda/filters.h"

#include <functional>

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kPerThread = 4, kPerBlock = kThreads * kPerThread;
// A copy takes neighbours, 16 bytes of the result, twice a thread.
constexpr int kNeighbours = 8, kCopies = 2, kPerCopyBlock = kThreads * kNeighbours * kCopies;

struct Filter {
  const float* weight;
  void* filter;
  std::size_t n;  // of the filter
  std::uint32_t in, taps, weight_out, weight_in, first_block;
  bool bf16;
  bool copy;  // to bfloat16 in the weight's own order, from where float4 may be read
};
// Filters that a launch makes, by value: what a graph has recorded is complete.
struct FilterList {
  static constexpr unsigned kMost = 72;
  unsigned count = 0, blocks = 0;
  Filter filter[kMost];
};
static_assert(sizeof(FilterList) <= 4096, "a kernel's parameters");

// In the order of the filter, so that a warp writes in one piece; caches make up for the strided reads.
__device__ inline float filter_element(const Filter& f, std::size_t at) {
  if (f.taps == 1 && f.in == f.weight_in) return at < std::size_t{f.weight_out} * f.in ? f.weight[at] : 0.0f;
  const std::size_t row = at / f.in;
  const std::size_t i = at - row * f.in, o = row / f.taps, tap = row - o * f.taps;
  return o < f.weight_out && i < f.weight_in ? f.weight[(o * f.weight_in + i) * f.taps + tap] : 0.0f;
}

struct alignas(16) Neighbours {
  __nv_bfloat16 at[kNeighbours];
};

__device__ inline void copy_block(const Filter& f, std::size_t block) {
  const std::size_t end = std::size_t{f.weight_out} * f.in;  // zeros from there on
  float values[kCopies][kNeighbours];
#pragma unroll
  for (int c = 0; c < kCopies; ++c) {
    const std::size_t at = ((block * kCopies + c) * kThreads + threadIdx.x) * kNeighbours;
    if (at + kNeighbours <= end) {
      load_quad<true>(f.weight + at, values[c]);
      load_quad<true>(f.weight + at + 4, values[c] + 4);
    } else {
      for (int i = 0; i < kNeighbours; ++i) values[c][i] = at + i < end ? f.weight[at + i] : 0.0f;
    }
  }
  __nv_bfloat16* const filter = static_cast<__nv_bfloat16*>(f.filter);
#pragma unroll
  for (int c = 0; c < kCopies; ++c) {
    const std::size_t at = ((block * kCopies + c) * kThreads + threadIdx.x) * kNeighbours;
    Neighbours rounded;
    for (int i = 0; i < kNeighbours; ++i) rounded.at[i] = from_float<__nv_bfloat16>(values[c][i]);
    if (at + kNeighbours <= f.n)
      *reinterpret_cast<Neighbours*>(filter + at) = rounded;
    else
      for (int i = 0; i < kNeighbours && at + i < f.n; ++i) filter[at + i] = rounded.at[i];
  }
}

__global__ __launch_bounds__(kThreads) void filters_kernel(const FilterList list) {
  await_previous();
  unsigned low = 0, high = list.count;  // first_block of low <= the block < that of high
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (list.filter[middle].first_block <= blockIdx.x ? low : high) = middle;
  }
  const Filter& f = list.filter[low];
  if (f.copy) return copy_block(f, blockIdx.x - f.first_block);
  std::size_t at = std::size_t{blockIdx.x - f.first_block} * kPerBlock + threadIdx.x;
  for (int j = 0; j < kPerThread && at < f.n; ++j, at += kThreads) {
    const float value = filter_element(f, at);
    if (f.bf16)
      static_cast<__nv_bfloat16*>(f.filter)[at] = from_float<__nv_bfloat16>(value);
    else
      static_cast<float*>(f.filter)[at] = value;
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void weight_kernel(const T* filter, float* weight, bool accumulate,
                                                          std::size_t n, unsigned in, unsigned taps) {
  await_previous();
  std::size_t at = std::size_t{blockIdx.x} * kPerBlock + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, at += kThreads) {
    if (at >= n) return;
    const std::size_t row = at / taps;
    const std::size_t tap = at - row * taps, o = row / in, i = row - o * in;
    const float value = as_float(filter[(o * taps + tap) * in + i]);
    weight[at] = accumulate ? weight[at] + value : value;
  }
}

void launch_list(cudaStream_t stream, FilterList& list) {
  if (list.blocks > 0) launch(filters_kernel, dim3(list.blocks), kThreads, stream, list);
  list.count = list.blocks = 0;
}
void append(FilterList& list, const float* weight, void* filter, bool bf16, const FilterShape& shape) {
  TOPKNOT_CHECK(shape.size() < std::size_t{1} << 32, "a weight of 2^32 elements or more");
  const bool copy = bf16 && shape.taps == 1 && shape.in == shape.weight_in &&
                    reinterpret_cast<std::uintptr_t>(weight) % sizeof(float4) == 0;
  list.filter[list.count++] = {weight,
                               filter,
                               shape.size(),
                               word(shape.in),
                               word(shape.taps),
                               word(shape.weight_out),
                               word(shape.weight_in),
                               list.blocks,
                               bf16,
                               copy};
  list.blocks += static_cast<unsigned>(ceil_div(shape.size(), copy ? kPerCopyBlock : kPerBlock));
}

// One per context: the filters whose scope is open.
struct Open {
  Filters* filters = nullptr;
};

}  // namespace

void filter_from_weight(cudaStream_t stream, const float* weight, void* filter, bool bf16,
                        FilterShape shape) {
  FilterList list;
  append(list, weight, filter, bf16, shape);
  launch_list(stream, list);
}

void weight_from_filter(cudaStream_t stream, const void* filter, bool bf16, float* weight, bool accumulate,
                        FilterShape shape) {
  by_type(bf16, [&]<class T>(T) {
    if (shape.size() > 0)
      launch(weight_kernel<T>, grid_for(shape.size(), kPerBlock), kThreads, stream,
             static_cast<const T*>(filter), weight, accumulate, shape.size(), word(shape.in),
             word(shape.taps));
  });
}

bool Filters::has(const Tensor& weight) const {
  const std::less<const float*> before;
  return !before(weight.data(), parameters_.data()) &&
         before(weight.data(), parameters_.data() + parameters_.size());
}

void Filters::make_all() const {
  FilterList list;
  for (const auto& [of, filter] : made_) {
    const auto& [weight, type, shape] = of;
    append(list, weight, const_cast<float*>(filter.data()), type == DType::bf16, shape);
    if (list.count == FilterList::kMost) launch_list(compute_stream(), list);
  }
  launch_list(compute_stream(), list);
}

Filters::Scope::Scope(Filters& filters) : open_(Context::current().keep<Open>().filters), before_(open_) {
  filters.make_all();
  open_ = &filters;
}
Filters::Scope::~Scope() {
  open_ = before_;
}

Tensor filter_of(const Tensor& weight, DType type, const FilterShape& shape) {
  Filters* open = Context::current().keep<Open>().filters;
  if (open && !open->has(weight)) open = nullptr;
  if (open)
    if (const auto made = open->made_.find({weight.data(), type, shape}); made != open->made_.end())
      return made->second;
  Tensor filter =
      Tensor::empty({static_cast<std::int64_t>(shape.size())}, Layout::plain, weight.device(), type);
  filter_from_weight(compute_stream(), weight.data(), filter.data(), type == DType::bf16, shape);
  if (open) open->made_[{weight.data(), type, shape}] = filter;
  return filter;
}

Tensor weight_as(DType type, const Tensor& weight) {
  return type == DType::f32 ? weight : filter_of(weight, type, {1, weight.numel(), 1});
}

}  // namespace topknot::cuda
