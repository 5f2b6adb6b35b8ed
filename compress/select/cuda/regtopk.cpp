#include "compress/select/regtopk.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/cuda/regtopk_kernels.h"
#include "compress/state.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

// The entries of the last step, in GPU memory.
class LastMemory {
 public:
  LastMemory() = default;
  explicit LastMemory(std::size_t capacity)
      : indices_(capacity), own_(capacity), surplus_(capacity), kept_(capacity) {}
  RegTopKLast last() const {
    return {indices_.data(), own_.data(), surplus_.data(), kept_.data(),
            static_cast<std::uint32_t>(indices_.size())};
  }
  std::size_t capacity() const { return indices_.size(); }

 private:
  DeviceArray<std::uint32_t> indices_;
  DeviceArray<double> own_, surplus_;
  DeviceArray<float> kept_;
};

template <class T>
void copy(T* to, const T* from, std::size_t count, cudaMemcpyKind kind) {
  if (count == 0) return;
  TOPKNOT_CUDA(cudaMemcpyAsync(to, from, count * sizeof(T), kind, Context::current().stream()));
}

// CUDA counterpart of RegTopKSelector. Its scores hold tanh in double: a GPU's may differ from the host's in the last bit, so that a score, which is
// rounded to float, differs in its last bit about once in 2^28, and only where that bit decides who is the k-th does
// another entry travel.
class RegTopKOnGpu final : public DeviceSelector {
 public:
  RegTopKOnGpu(const CompressOptions& options, std::size_t n, std::size_t) : n_(n), control_(1) {
    rule_ = regtopk_score(options);
    regtopk_clear(Context::current().stream(), control_.data());
  }

  std::size_t capacity(double density) const override { return target_count(density, n_); }

  void set_density(double density) override {
    list_ = ListMemory(n_, list_limit(capacity(density)));
    reserve(capacity(density));
  }

  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* parameters,
              const DeviceSelected& selected) override {
    RegTopKControl* const control = control_.data();
    const EntryList& list = list_.list();
    const RegTopKLast last = last_.last();
    const StatsOut stats = stats_of(selected);
    Taken taken = taken_of(selected);
    taken.threshold = nullptr;  // what would go there is a score
    regtopk_plan(stream, rule_, n_, std::min(selected.capacity, last.capacity), parameters, control);
    accumulate_and_list(stream, accumulate, n_, &control->listed_above, list_.tiles(), list);
    regtopk_judge(stream, rule_, last, list, control, stats);
    regtopk_put_scores(stream, rule_, last, accumulate.u, control);
    take_largest(stream, source_of(list), source_of(accumulate.u, n_), scratch_.memory(), &control->choice,
                 taken);
    regtopk_take_scores_back(stream, last, accumulate.u, control);
    regtopk_finish(stream, rule_, accumulate.u, control, taken, stats);
  }

  void commit(cudaStream_t stream, const StepStatus* status, const DeviceSelected& selected,
              const float* sent, const float* average, const float* weight, int ranks) override {
    regtopk_commit(stream, status, selected.indices, &selected.stats->count, sent, average, weight, ranks,
                   last_.last(), control_.data());
  }

  void save(StateWriter& writer) const override {
    Context::current().synchronize();
    const RegTopKControl control = control_on_host();
    const RegTopKLast last = last_.last();
    std::vector<std::uint32_t> indices(control.last);
    std::vector<double> own(control.last), surplus(control.last);
    copy(indices.data(), last.indices, indices.size(), cudaMemcpyDeviceToHost);
    copy(own.data(), last.own, own.size(), cudaMemcpyDeviceToHost);
    copy(surplus.data(), last.surplus, surplus.size(), cudaMemcpyDeviceToHost);
    Context::current().synchronize();
    writer.put_list(indices);
    writer.put_list(own);
    writer.put_list(surplus);
    writer.put(control.weight);
  }

  void load(StateReader& reader) override {
    const auto indices = reader.get_list<std::uint32_t>();
    const auto own = reader.get_list<double>(indices.size());
    const auto surplus = reader.get_list<double>(indices.size());
    const auto weight = reader.get<double>();
    if (std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) != indices.end())
      StateReader::fail("names the entries of regtopk's last step out of order");
    if (!indices.empty() && indices.back() >= n_)
      StateReader::fail("names entries of regtopk's last step beyond the vector");
    Context::current().synchronize();
    RegTopKControl control = control_on_host();
    control.last = 0;  // what was there need not be copied
    copy(control_.data(), &control, 1, cudaMemcpyHostToDevice);
    reserve(indices.size());
    const RegTopKLast last = last_.last();
    control.last = static_cast<std::uint32_t>(indices.size());
    control.weight = weight;
    copy(last.indices, indices.data(), indices.size(), cudaMemcpyHostToDevice);
    copy(last.own, own.data(), own.size(), cudaMemcpyHostToDevice);
    copy(last.surplus, surplus.data(), surplus.size(), cudaMemcpyHostToDevice);
    copy(control_.data(), &control, 1, cudaMemcpyHostToDevice);
    Context::current().synchronize();
  }

 private:
  RegTopKControl control_on_host() const {
    RegTopKControl control;
    copy(&control, static_cast<const RegTopKControl*>(control_.data()), 1, cudaMemcpyDeviceToHost);
    Context::current().synchronize();
    return control;
  }

  // Room for `capacity` entries at least; the last step's stay. A fall of density leaves it as it is, because more
  // were sent in the last step than will be in the next.
  void reserve(std::size_t capacity) {
    if (capacity <= last_.capacity()) return;
    LastMemory larger(capacity);
    const RegTopKLast from = last_.last(), to = larger.last();
    copy(to.indices, from.indices, from.capacity, cudaMemcpyDeviceToDevice);
    copy(to.own, from.own, from.capacity, cudaMemcpyDeviceToDevice);
    copy(to.surplus, from.surplus, from.capacity, cudaMemcpyDeviceToDevice);
    last_ = larger;
  }

  std::size_t n_;
  RegTopKScore rule_;
  ListMemory list_;
  LargestScratch scratch_;
  LastMemory last_;
  DeviceArray<RegTopKControl> control_;
};

const bool regtopk_registered = [] {
  add_device_selector<RegTopKOnGpu>("regtopk");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
