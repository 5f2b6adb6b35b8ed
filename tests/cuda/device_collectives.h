#pragma once
// Ranks as threads of a test, each with a context of its own, on one GPU or on one each; and what every
// device communicator must do, for the tests of both.
#include "dist/comm/cuda/device_communicator.h"
#include "dist/comm/ordered_sum.h"
#include "nn/core/cuda/context.h"
#include "nn/core/rng.h"
#include "tests/dist/ranks.h"
#include "tests/support/same_bits.h"

namespace topknot {

struct DeviceRank {
  Communicator& host;
  cuda::Context& context;
  cuda::DeviceCommunicator& device;
  int rank() const { return host.rank(); }
  int size() const { return host.size(); }
  cudaStream_t stream() const { return context.communication(); }
};

// What each rank threw, "" where nothing. `make`: make_device_threads (all on GPU 0) or
// make_nccl_communicator (rank r on GPU r).
using MakeDevice = std::unique_ptr<cuda::DeviceCommunicator> (*)(Communicator&, double);
inline std::vector<std::string> errors_of_device_ranks(MakeDevice make, int ranks,
                                                       const std::function<void(DeviceRank&)>& body,
                                                       double timeout_s = 60) {
  return errors_of_ranks("threads", ranks, {timeout_s}, [&](Communicator& host) {
    cuda::Context context(
        {make == cuda::make_device_threads ? 0 : host.rank(), host.rank(), cuda::Precision::fp32, true});
    const cuda::Context::Use use(context);
    const auto device = make(host, timeout_s);
    DeviceRank rank{host, context, *device};
    body(rank);
    // Others' work may still use this rank's memory and events.
    device->wait(rank.stream());
    context.synchronize();
  });
}

inline void run_device_ranks(MakeDevice make, int ranks, const std::function<void(DeviceRank&)>& body) {
  for (const auto& error : errors_of_device_ranks(make, ranks, body))
    if (!error.empty()) throw std::runtime_error(error);
}

// Bytes or numbers in GPU memory, copied on a stream and never waited for. `values` must stay as they are
// until the stream has come to the copy.
template <class T>
void to_gpu(std::span<const T> values, T* to, cudaStream_t stream) {
  TOPKNOT_CUDA(cudaMemcpyAsync(to, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream));
}
template <class T>
void from_gpu(const T* from, std::span<T> values, cudaStream_t stream) {
  TOPKNOT_CUDA(cudaMemcpyAsync(values.data(), from, values.size_bytes(), cudaMemcpyDeviceToHost, stream));
}

// Sums of several magnitudes, so that another order of additions gives other bits.
inline float rough(int rank, int round, std::size_t i) {
  const CounterRng rng(7, RngUse::compress, std::uint64_t(rank), std::uint64_t(round));
  const float x = rng.normal(i);
  return i % 3 == 0 ? 1000.0f * x : x;
}

template <class T>
T element(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return to_bfloat16(x);
}

template <class T>
std::vector<T> rough_values(int rank, int round, std::size_t n) {
  std::vector<T> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = element<T>(rough(rank, round, i));
  return values;
}

template <class T>
std::vector<T> ordered_sum_of_ranks(int ranks, int round, std::size_t n) {
  std::vector<std::vector<T>> all;
  std::vector<const T*> sources;
  for (int r = 0; r < ranks; ++r) all.push_back(rough_values<T>(r, round, n));
  for (const auto& values : all) sources.push_back(values.data());
  std::vector<T> sum(n);
  ordered_sum(std::span<const T* const>(sources), sum.data(), n);
  return sum;
}

template <class T>
void all_reduce(DeviceRank& rank, T* data, std::size_t n, SumOrder order) {
  rank.device.all_reduce(std::is_same_v<T, float> ? DType::f32 : DType::bf16, data, n, order, rank.stream());
}

// Sums in rank order of `n` elements that lie `offset` elements into a block, of floats also by halves: the first
// length that is wrong on some rank, or -1.
template <class T>
std::ptrdiff_t wrong_sum(MakeDevice make, int ranks, std::span<const std::size_t> lengths,
                         std::size_t offset = 0) {
  std::vector<std::vector<T>> expected;
  for (const std::size_t n : lengths) expected.push_back(ordered_sum_of_ranks<T>(ranks, 0, n));
  std::vector<std::ptrdiff_t> wrong(static_cast<std::size_t>(ranks), -1);
  run_device_ranks(make, ranks, [&](DeviceRank& rank) {
    for (std::size_t l = 0; l < lengths.size(); ++l) {
      const std::size_t n = lengths[l];
      const std::vector<T> mine = rough_values<T>(rank.rank(), 0, n);
      const cuda::DeviceArray<T> memory(n + offset + 1);
      rank.context.synchronize();
      std::vector<T> sum(n), halves(n);
      T* const data = memory.data() + offset;
      to_gpu<T>(mine, data, rank.stream());
      all_reduce(rank, data, n, SumOrder::ranks);
      from_gpu<T>(data, sum, rank.stream());
      if constexpr (std::is_same_v<T, float>) {
        to_gpu<T>(mine, data, rank.stream());
        rank.device.reduce_scatter(data, n, rank.stream());
        // Nothing but this rank's slice is left of the first half.
        const ElementRange own = slice_of(n, rank.size(), rank.rank());
        cudaMemsetAsync(data, 0, own.begin * sizeof(T), rank.stream());
        cudaMemsetAsync(data + own.end, 0, (n - own.end) * sizeof(T), rank.stream());
        rank.device.all_gather_slices(data, n, rank.stream());
        from_gpu<T>(data, halves, rank.stream());
      }
      rank.device.wait(rank.stream());
      if (!same_bits(sum, expected[l]) || (std::is_same_v<T, float> && !same_bits(halves, sum)))
        wrong[std::size_t(rank.rank())] = std::ptrdiff_t(n);
    }
  });
  for (const auto n : wrong)
    if (n >= 0) return n;
  return -1;
}

// Fifty sums and gathers back to back, all in the same memory, which is filled anew right after each call and
// waited for only at the end: the first round that is wrong on some rank, or -1.
template <class T>
int wrong_round(MakeDevice make, int ranks, std::size_t n) {
  constexpr int rounds = 50;
  std::vector<int> wrong(static_cast<std::size_t>(ranks), -1);
  std::vector<std::vector<T>> expected;
  for (int round = 0; round < rounds; ++round) expected.push_back(ordered_sum_of_ranks<T>(ranks, round, n));
  run_device_ranks(make, ranks, [&](DeviceRank& rank) {
    const auto blocks = std::size_t(ranks);
    std::vector<std::vector<T>> mine, sums(rounds, std::vector<T>(n)),
        gathered(rounds, std::vector<T>(n * blocks));
    for (int round = 0; round < rounds; ++round) mine.push_back(rough_values<T>(rank.rank(), round, n));
    const cuda::DeviceArray<T> memory(n), all(n * blocks);
    rank.context.synchronize();
    const auto stream = rank.stream();
    for (std::size_t round = 0; round < rounds; ++round) {
      to_gpu<T>(mine[round], memory.data(), stream);
      rank.device.all_gather(reinterpret_cast<const std::byte*>(memory.data()),
                             reinterpret_cast<std::byte*>(all.data()), n * sizeof(T), stream);
      all_reduce(rank, memory.data(), n, SumOrder::ranks);
      from_gpu<T>(memory.data(), sums[round], stream);
      from_gpu<T>(all.data(), gathered[round], stream);
    }
    rank.device.wait(stream);
    for (int round = rounds - 1; round >= 0; --round) {
      std::vector<T> blocks_of_all;
      for (int r = 0; r < ranks; ++r)
        for (const T value : rough_values<T>(r, round, n)) blocks_of_all.push_back(value);
      const auto at = std::size_t(round);
      if (!same_bits(sums[at], expected[at]) || !same_bits(gathered[at], blocks_of_all))
        wrong[std::size_t(rank.rank())] = round;
    }
  });
  for (const int round : wrong)
    if (round >= 0) return round;
  return -1;
}

// Blocks of `bytes` from everybody, then rank `ranks - 1`'s to all: true where every rank has what it should.
inline bool gathers_and_broadcasts(MakeDevice make, int ranks, std::size_t bytes) {
  const auto byte = [](int rank, std::size_t i) { return std::byte((rank * 37 + 11 * i) % 251); };
  std::vector<char> right(static_cast<std::size_t>(ranks), 1);
  run_device_ranks(make, ranks, [&](DeviceRank& rank) {
    const auto blocks = std::size_t(ranks);
    std::vector<std::byte> mine(bytes), all(bytes * blocks), root(bytes);
    for (std::size_t i = 0; i < bytes; ++i) mine[i] = byte(rank.rank(), i);
    const cuda::DeviceArray<std::byte> block(bytes + 1), gathered(bytes * blocks + 1);
    rank.context.synchronize();
    to_gpu<std::byte>(mine, block.data(), rank.stream());
    rank.device.all_gather(block.data(), gathered.data(), bytes, rank.stream());
    from_gpu<std::byte>(gathered.data(), all, rank.stream());
    rank.device.broadcast(block.data(), bytes, ranks - 1, rank.stream());
    from_gpu<std::byte>(block.data(), root, rank.stream());
    rank.device.wait(rank.stream());
    char& good = right[std::size_t(rank.rank())];
    for (std::size_t i = 0; i < bytes; ++i) {
      for (std::size_t r = 0; r < blocks; ++r)
        if (all[r * bytes + i] != byte(int(r), i)) good = 0;
      if (root[i] != byte(ranks - 1, i)) good = 0;
    }
  });
  return std::find(right.begin(), right.end(), 0) == right.end();
}

}  // namespace topknot
