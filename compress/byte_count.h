#pragma once
// What compression saves, in bytes: the one definition that metrics, reports and tests share. Payload of the
// collectives with the blocks' headers, without the transport's framing.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace topknot {

// One rank's bytes of a step, or of many.
struct ByteCount {
  std::uint64_t upload = 0;
  std::uint64_t download = 0;  // from all other ranks; an all-reduce counts its length once
  std::uint64_t dense = 0;     // what the same gradients take as floats: 4 d

  // Blocks of any length from every rank: this rank gets those of all others.
  void add_gather(std::span<const std::uint64_t> block_bytes, int rank);
  // A sum of that many bytes over the ranks.
  void add_sum(std::uint64_t bytes);
  ByteCount& operator+=(const ByteCount& other);
  // The true ratio, dense / upload. 0 where nothing was sent.
  double ratio() const;
};

struct TensorShape {
  std::size_t numel = 0;
  bool one_dimensional = false;  // biases, normalisation: what DGC leaves dense
};

// How a model's gradient travels.
struct WirePlan {
  enum class OneDimensional { sparse, dense_fp32, dense_fp16 };
  double density = 0.001;
  std::string codec = "rice", values = "fp16";  // compress.codec and .values, of what is sparse
  OneDimensional one_dimensional = OneDimensional::sparse;
  bool merged = true;  // false: a message and a k for each tensor
};

// The messages of a plan: numel, and the entries sent of them, k = target_count(density, numel) or all.
struct PlannedMessage {
  std::size_t numel = 0, count = 0;
  std::string codec, values;
};
std::vector<PlannedMessage> planned_messages(std::span<const TensorShape> tensors, const WirePlan& plan);

// A step's bytes from the shapes alone: headers included, positions as if drawn uniformly, the same count on
// each rank. Throws UserError for an unknown code or a density outside (0, 1].
ByteCount planned_bytes(std::span<const TensorShape> tensors, const WirePlan& plan, int ranks);

// The accounting behind the ratios that the Deep Gradient Compression paper publishes (Lin et al., ICLR 2018,
// tables 3 and 4): of each tensor with two dimensions or more ceil(density * numel) entries of 48 bits, a
// float and a 16-bit run of zeros; other tensors as floats; no headers.
ByteCount dgc_paper_bytes(std::span<const TensorShape> tensors, double density, int ranks);

}  // namespace topknot
