#pragma once
// Dense sums in few bits, for compress.name dense with a value codec that rounds: every gradient entry is sent, coded, to
// the one rank that sums it, and the sum is coded once more on its way back. Per rank that is 2 (P - 1) / P messages of
// the whole vector, as for a ring's sums, where gathering rounded vectors takes P - 1 of them.
//
// Both roundings have error feedback, as DoubleSqueeze (Tang et al., arXiv 1905.05957). There the summing rank has a
// memory of its own for the second error; here it adds that error, divided by its own share of the average, to its
// residual, from which the next sum gets it back. encode() leaves in the slice's gradient what its message leaves of u.
//
// A message consists of one piece for each rank, all of one length: piece r has the elements from r * n on, n being the
// P-th part of them in multiples of 16, zeros behind the last. A piece is a header (compress/codec/codec.h, with the
// layout `all`) and n values, coded in chunks of kChunk. The second message is the rank's own piece of the average.
// Without the header's flag the rest of a piece is zeros.

#include <memory>

#include "compress/compressor.h"

namespace topknot {

// These are for method dense with a value codec other than fp32 and bf16. They throw UserError for a codec whose length depends on the
// values, and a memory other than residual and none.
std::unique_ptr<Compressor> make_coded_dense(const CompressOptions& options, const GroupSpec& group);
std::size_t coded_dense_bytes(const CompressOptions& options, const GroupSpec& group);  // of both messages

}  // namespace topknot
