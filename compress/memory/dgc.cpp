#include "compress/memory/dgc.h"

#include <fmt/format.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "compress/parallel.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

constexpr std::size_t kAlignment = 64, kHugePage = std::size_t{1} << 21;

const Option kMomentumMasking{
    .name = "momentum_masking", .standard = true, .help = "what is sent loses its velocity"};

}  // namespace

bool momentum_masking(const CompressOptions& options) {
  return options.get<bool>(kMomentumMasking);
}

void DgcMemory::Free::operator()(float* p) const {
  std::free(p);
}

DgcMemory::Buffer DgcMemory::allocate(std::size_t size) {
  const std::size_t unit = size * sizeof(float) >= kHugePage ? kHugePage : kAlignment;
  const std::size_t bytes = (size * sizeof(float) + unit - 1) / unit * unit;
  void* data = std::aligned_alloc(unit, bytes);
  if (!data) throw Error(fmt::format("out of memory: could not allocate {} bytes", bytes));
  // A quarter off the pass, where the system has such pages; a hint, so its failure does not matter.
  if (unit == kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
  return Buffer(static_cast<float*>(data));
}

DgcMemory::DgcMemory(const CompressOptions& options)
    : momentum_(static_cast<float>(options.momentum)),
      nesterov_(options.nesterov),
      masking_(momentum_masking(options)) {}

FeedbackInput DgcMemory::input(std::span<float> gradient, std::span<const float> spare) {
  const std::size_t n = gradient.size();
  TOPKNOT_CHECK(spare.size() == n, "momentum correction needs a residual as long as the gradient");
  FeedbackInput result(spare);
  if (momentum_ == 0) return result;
  if (size_ == 0 && n > 0) {
    velocity_ = allocate(n);
    size_ = n;
    // By the threads that will read it, so that its pages lie near them.
    for_parts(n, part_count(n), [&](std::size_t, std::size_t begin, std::size_t end) {
      std::fill(velocity_.get() + begin, velocity_.get() + end, 0.0f);
    });
  }
  if (size_ != n) StateReader::fail(fmt::format("has a velocity of {} values where {} are needed", size_, n));
  if (!next_) next_ = allocate(n);
  result.velocity = velocity_.get();
  result.next_velocity = next_.get();
  result.momentum = momentum_;
  result.nesterov = nesterov_;
  return result;
}

void DgcMemory::commit(std::span<float> u, std::span<float>, std::span<const std::uint32_t> indices,
                       std::span<const float> sent, std::span<const std::uint32_t> rejected) {
  std::vector<std::uint32_t> kept(rejected.begin(), rejected.end());
  std::sort(kept.begin(), kept.end());
  float* const velocity = momentum_ != 0 && masking_ ? next_.get() : nullptr;
  const auto take = [&](std::size_t begin, std::size_t end) {
    constexpr std::size_t ahead = 24;  // what costs is the wait for memory
    for (std::size_t i = begin; i < end; ++i) {
      if (i + ahead < end) {
        __builtin_prefetch(&u[indices[i + ahead]], 1);
        if (velocity) __builtin_prefetch(velocity + indices[i + ahead], 1);
      }
      if (!kept.empty() && std::binary_search(kept.begin(), kept.end(), indices[i])) continue;
      u[indices[i]] -= sent[i];
      if (velocity) velocity[indices[i]] = 0.0f;
    }
  };
  const std::size_t n = indices.size(), parts = std::min<std::size_t>(part_count(u.size()), n / 1024 + 1);
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1) if (parts > 1)
  for (std::size_t part = 0; part < parts; ++part) take(n * part / parts, n * (part + 1) / parts);
  if (momentum_ != 0) velocity_.swap(next_);
}

void DgcMemory::save(StateWriter& writer) const {
  writer.put_list(velocity());
}

void DgcMemory::load(StateReader& reader) {
  const std::vector<float> velocity = reader.get_list<float>();
  if (momentum_ == 0 && !velocity.empty()) StateReader::fail("has a velocity, and optimizer.momentum is 0");
  if (size_ != 0 && !velocity.empty() && velocity.size() != size_)
    StateReader::fail("has a velocity of another length");
  next_.reset();
  velocity_.reset();
  size_ = velocity.size();
  if (size_ == 0) return;
  velocity_ = allocate(size_);
  std::copy(velocity.begin(), velocity.end(), velocity_.get());
}

namespace {

const bool dgc_registered = [] {
  add_memory<DgcMemory>("dgc",
                        "momentum before selection: velocities are accumulated, what is sent loses its own",
                        {.owns_momentum = true, .depends_on_lr = "the velocity"}, {kMomentumMasking});
  add_sparse("dgc",
             "Deep Gradient Compression: momentum before selection, a threshold from a sample, masking",
             {.select = "dgc_sampled", .memory = "dgc"});
  return true;
}();

}  // namespace
}  // namespace topknot
