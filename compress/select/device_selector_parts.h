#pragma once
// The selectors of compress/select/device_selector.h that make_device_selector() finds, each in its own file.

#include <cstddef>
#include <memory>

#include "compress/select/device_selector.h"

namespace topknot::cuda {

// compress.select dgc_sampled and regtopk, entry by entry what the CPU's select. Both want set_density() before
// the first select(). Throw UserError for options that the CPU's refuse.
//
// regtopk's scores hold tanh in double: a GPU's may differ from the host's in the last bit, so that a score, which
// is rounded to float, differs in its last bit about once in 2^28 scores, and only where that bit decides who is
// the k-th does another entry travel.
std::unique_ptr<DeviceSelector> make_dgc_sampled_on_gpu(const CompressOptions& options, std::size_t n,
                                                        std::size_t position);
std::unique_ptr<DeviceSelector> make_regtopk_on_gpu(const CompressOptions& options, std::size_t n);

}  // namespace topknot::cuda
