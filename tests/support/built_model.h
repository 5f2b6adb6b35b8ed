#pragma once
// A model in a store of its own.

#include "nn/models/model.h"
#include "tests/support/slope.h"
#include "tests/support/variables.h"

namespace topknot::testing {

struct BuiltModel {
  BuiltModel(const std::string& name, const ModelOptions& options, std::uint64_t seed = 1)
      : model(make_model(name, store, options)) {
    store.build([](const Parameter& p) { return p.shape().rank() > 1; }, seed);
  }
  Parameter& parameter(const std::string& name) const {
    for (const auto& p : store.parameters())
      if (p->name() == name) return *p;
    throw Error("no parameter " + name);
  }
  ParameterStore store;
  ModulePtr model;
};

inline std::size_t parameters_of(const std::string& name, const ModelOptions& options) {
  ParameterStore store;
  make_model(name, store, options);
  std::size_t sum = 0;
  for (const auto& p : store.parameters()) sum += p->numel();
  return sum;
}

inline ForwardContext evaluation() {
  ForwardContext context;
  context.training = false;
  return context;
}

}  // namespace topknot::testing
