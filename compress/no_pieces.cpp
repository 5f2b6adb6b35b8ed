#include "compress/no_pieces.h"

#include "nn/core/base/check.h"
#include "nn/core/base/text.h"

namespace topknot {

void refuse_key(const CompressOptions& options, const std::string& key, const std::string& value,
                const std::string& reason) {
  throw UserError("compress." + key + ": " + value + " makes no sense with compress.name: " + options.name +
                  ", " + reason);
}

void refuse_pieces(const CompressOptions& options, const std::string& sends, bool sums) {
  const std::string reason = "which sends " + sends + "; remove the key or choose another compressor";
  if (!options.select.empty()) refuse_key(options, "select", options.select, reason);
  if (!options.codec.empty()) refuse_key(options, "codec", options.codec, reason);
  if (!options.values.empty() && !(sums && options.values == "fp32"))
    refuse_key(options, "values", options.values, reason);
  if (options.capacity != 0) refuse_key(options, "capacity", short_text(options.capacity), reason);
  if (!options.memory.empty() && options.memory != "residual" && options.memory != "none")
    refuse_key(options, "memory", options.memory,
               "which has plain error feedback or none; use residual or none");
  if (options.lr_inside)
    refuse_key(options, "lr_inside", "true",
               "which accumulates gradients as its paper does; remove the key or choose a sparse method");
}

}  // namespace topknot
