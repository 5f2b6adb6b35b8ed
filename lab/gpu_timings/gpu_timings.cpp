#include "lab/gpu_timings/gpu_timings.h"

#include <algorithm>

namespace topknot::gpu_timings {

std::vector<std::size_t> sizes_of(const Options& options) {
  std::vector<std::size_t> sizes;
  for (int power = options.smallest; power <= options.largest; power += 2)
    sizes.push_back(std::size_t{1} << power);
  constexpr std::size_t resnet50 = 25600000;  // about its parameters, as papers quote top-k
  if (resnet50 >> options.smallest && resnet50 >> options.largest == 0) sizes.push_back(resnet50);
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

}  // namespace topknot::gpu_timings
