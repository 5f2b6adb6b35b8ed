#include "nn/models/model.h"

#include <fmt/format.h>

namespace topknot {

void require_images(const ModelOptions& options, const char* model, std::int64_t least) {
  const Shape& x = options.input;
  if (x.rank() != 3 || x[1] < least || x[2] < least)
    throw UserError(fmt::format("model.name: {0} needs images of at least {1}x{1} pixels, not {2}", model,
                                least, x.str()));
}

}  // namespace topknot
