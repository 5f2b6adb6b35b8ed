#pragma once
// Factories of what exists in float, for training, and in double, for studies and comparisons to the last
// digit.

#include <memory>
#include <string>
#include <type_traits>

#include "compress/compressor.h"
#include "nn/core/base/registry.h"

namespace topknot {

// Interface: Selector or Memory.
template <template <class> class Interface>
struct PrecisionFactory {
  std::unique_ptr<Interface<float>> (*single)(const CompressOptions&);
  std::unique_ptr<Interface<double>> (*twice)(const CompressOptions&);

  template <class T>
  std::unique_ptr<Interface<T>> make(const CompressOptions& options) const {
    if constexpr (std::is_same_v<T, float>)
      return single(options);
    else
      return twice(options);
  }
};

template <template <class> class Interface, template <class> class Implementation, class T>
std::unique_ptr<Interface<T>> make_implementation(const CompressOptions& options) {
  if constexpr (std::is_constructible_v<Implementation<T>, const CompressOptions&>)
    return std::make_unique<Implementation<T>>(options);
  else
    return std::make_unique<Implementation<T>>();
}

// The factory of a class template, made from options where its constructor takes them.
template <template <class> class Interface, template <class> class Implementation>
PrecisionFactory<Interface> factory_of() {
  return {&make_implementation<Interface, Implementation, float>,
          &make_implementation<Interface, Implementation, double>};
}

}  // namespace topknot
