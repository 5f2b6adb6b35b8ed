#pragma once
// The blocks of the quantising methods that also have kernels. Throw UserError as make_compressor() does.

#include "compress/compressor.h"
#include "compress/quantise/block.h"

namespace topknot::quantise {

Format signsgd_format(const CompressOptions& options, const GroupSpec& group);  // compress/signsgd.cpp
Format qsgd_format(const CompressOptions& options, const GroupSpec& group);     // compress/qsgd.cpp

// Whether the method of these options keeps what rounding takes away.
inline bool signsgd_keeps(const CompressOptions& options) {
  return options.memory != "none";
}
inline bool qsgd_keeps(const CompressOptions& options) {
  return options.memory == "residual";
}

}  // namespace topknot::quantise
