#pragma once
// A named range in the timeline of Nsight Systems, from here to the end of the scope; nothing where no profiler
// listens.

#include <nvtx3/nvToolsExt.h>

namespace topknot::cuda {

class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace topknot::cuda
