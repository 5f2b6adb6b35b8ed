#include "compress/select/cuda/device_selector.h"

#include "compress/select/cuda/device_selectors.h"

namespace topknot::cuda {

std::unique_ptr<DeviceSelector> make_device_selector(const std::string& select,
                                                     const CompressOptions& options, std::size_t n,
                                                     std::size_t position) {
  if (select == "topk") return make_device_topk(options, n);
  if (select == "threshold") return make_device_threshold(options, n);
  if (select == "gaussiank") return make_device_gaussiank(options, n);
  if (select == "dgc_sampled") return make_device_dgc_sampled(options, n, position);
  if (select == "regtopk") return make_device_regtopk(options, n);
  return nullptr;
}

}  // namespace topknot::cuda
