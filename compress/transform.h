#pragma once
// A change of coordinates before the selection, and back after the average (compress.transform).
//
// `block`: blocks of 64 x 64 or less of each matrix, or of up to 64 neighbours of a vector, one after the other, as SparseLoCo's
// released code selects (Sarfi et al., arXiv 2508.15706).
//
// `dct`: these blocks' orthonormal discrete cosine transform, DCT-II: a block B of h x w becomes C_h B C_w^T with
// C_n[k][j] = s_k cos(pi (2 j + 1) k / (2 n)), s_0 = sqrt(1 / n), else sqrt(2 / n), and back by the transposes.
// DeMo (Peng et al., arXiv 2411.19870) selects by block from these coefficients.
//
// A block's sides are the largest divisors up to 64 of the matrix's, as in the released code of both: 64 x 64 if they are
// multiples of 64, 48 x 50 for 96 x 100, a single entry for two primes above 64. The entries of a block lie together, row
// by row, block after block in the order of rows; selection chunk_topk takes its chunks from blocks.

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

class BlockTransform {
 public:
  static constexpr std::size_t kBlock = 64;
  // A block's: the largest divisor up to kBlock.
  static std::size_t side(std::size_t length) {
    std::size_t side = std::min(kBlock, length);
    while (side > 1 && length % side != 0) --side;
    return side;
  }
  BlockTransform(const GroupSpec& group, bool cosine);

  // In place, of the whole group. The same bits for any number of threads.
  void forward(std::span<float> values) { apply(values, true); }
  void inverse(std::span<float> values) { apply(values, false); }

 private:
  struct Block {
    std::size_t from, stride;  // its first element, and from row to row, in the group
    std::size_t to;            // where its coefficients begin
    std::size_t rows, cols;
  };
  void apply(std::span<float> values, bool forward);

  const bool cosine_;
  std::vector<Block> blocks_;
  std::vector<std::vector<float>> cosines_;  // C_n by n, of the sizes that occur; none for `block`
  std::vector<float> before_;
};

// The group's tensors; itself as one vector if it names none.
std::vector<TensorSpec> tensors_of(const GroupSpec& group);

// Makes the transform that compress.transform names; null for none.
std::unique_ptr<BlockTransform> make_transform(const std::string& name, const GroupSpec& group);

}  // namespace topknot
