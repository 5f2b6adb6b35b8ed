#pragma once
// A model's weights and statistics as they stand, for comparison.

#include "train/checkpoint/model_file.h"
#include "train/evaluate.h"

namespace topknot {

inline ModelCopy copy_model(ParameterStore& store) {
  ModelCopy copy;
  copy.weights = store.arena().host_weights();
  store.statistics_to_host();
  copy_statistics(store, copy.statistics);
  return copy;
}

}  // namespace topknot
