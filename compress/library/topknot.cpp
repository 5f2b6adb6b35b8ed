// libtopknot's calls (include/topknot.h). A compressor of the library is one of compress/compressor.h for each tensor, or one
// for all of them with scope=model; which tensors share a call may change from step to step, as PyTorch's buckets do,
// and what was not sent stays with its tensor.
#include "include/topknot.h"

#include <omp.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "compress/library/handle.h"
#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

thread_local char last_error[2048] = "";

// The error's text as one line, whatever names are in it, and without the place in our sources.
void set_error(std::string_view text) noexcept {
  try {
    const std::string line = one_line(text.substr(0, text.find(" [failed: ")), sizeof last_error - 48);
    std::snprintf(last_error, sizeof last_error, "%s", line.c_str());
  } catch (const std::exception&) {
    std::snprintf(last_error, sizeof last_error, "out of memory");
  }
}

// Runs a call. No exception leaves the library.
topknot_result guarded(const auto& call) noexcept {
  const auto failed = [](topknot_result result, const char* text) {
    set_error(text);
    return result;
  };
  try {
    return call();
  } catch (const DeviceError& error) {
    return failed(TOPKNOT_FAILED, error.what());
  } catch (const Error& error) {
    return failed(TOPKNOT_INVALID, error.what());
  } catch (const std::bad_alloc&) {
    return failed(TOPKNOT_FAILED, "out of memory");
  } catch (const std::exception& error) {
    return failed(TOPKNOT_FAILED, error.what());
  } catch (...) {
    return failed(TOPKNOT_FAILED, "an unknown error");
  }
}

// OpenMP's number of threads while it lives.
class Threads {
 public:
  explicit Threads(int count) : before_(omp_get_max_threads()) {
    if (count > 0) omp_set_num_threads(count);
  }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  const int before_;
};

const Tensor& tensor_at(const topknot_compressor& compressor, std::int32_t which) {
  if (which < 0 || static_cast<std::size_t>(which) >= compressor.tensors.size())
    refuse("there is no tensor " + std::to_string(which));
  return compressor.tensors[static_cast<std::size_t>(which)];
}

// The call on a compressor, alone and with its threads.
topknot_result locked(topknot_compressor* compressor, const auto& call) noexcept {
  return guarded([&] {
    if (!compressor) refuse("the compressor is null");
    const std::lock_guard lock(compressor->mutex);
    const Threads threads(compressor->settings.threads);
    const std::shared_ptr<void> entered = compressor->place->enter();
    return call();
  });
}

// Parses key `device`.
std::unique_ptr<Place> place_of(const std::string& device, int rank) {
  if (device == "cpu") return make_host();
  if (device == "cuda") return make_gpu(-1, rank);
  int index = -1;
  const std::string number = device.rfind("cuda:", 0) == 0 ? device.substr(5) : "";
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
  if (number.empty() || error != std::errc{} || end != number.data() + number.size() || index < 0)
    refuse("key 'device' must be cpu, cuda, or cuda:N, not '" + device + "'");
  return make_gpu(index, rank);
}

// A pointer to numbers of this type.
bool is_aligned(const void* pointer, topknot_type type) {
  return reinterpret_cast<std::uintptr_t>(pointer) % (type == TOPKNOT_FLOAT32 ? 4 : 2) == 0;
}

topknot_result locked_round(topknot_round* round, const auto& call) noexcept {
  if (!round) return guarded([]() -> topknot_result { refuse("the round is null"); });
  return locked(round->owner, call);
}

}  // namespace
}  // namespace topknot

using namespace topknot;

const char* topknot_version() {
  return TOPKNOT_VERSION;
}

int topknot_interface() {
  return TOPKNOT_INTERFACE;
}

const char* topknot_error() {
  return last_error;
}

const char* topknot_methods() {
  static std::string json;
  static std::once_flag once;
  const topknot_result result = guarded([] {
    std::call_once(once, [] { json = methods_json(); });
    return TOPKNOT_OK;
  });
  return result == TOPKNOT_OK ? json.c_str() : "{}";
}

topknot_result topknot_create(const char* method, const char* const* keys, size_t key_count,
                              const topknot_tensor* tensors, size_t tensor_count, int rank, int ranks,
                              topknot_compressor** made) {
  return guarded([&] {
    if (!method || !made || (key_count > 0 && !keys) || (tensor_count > 0 && !tensors))
      refuse("an argument is null");
    if (ranks < 1 || rank < 0 || rank >= ranks)
      refuse("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " does not exist");
    if (tensor_count == 0) refuse("there is no tensor");
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < key_count; ++i) {
      if (!keys[i]) refuse("a key is null");
      texts.emplace_back(keys[i]);
    }
    auto compressor = std::make_unique<topknot_compressor>();
    compressor->settings = library_settings(method, texts);
    compressor->rank = rank, compressor->ranks = ranks;
    std::set<std::string> names;
    for (std::size_t i = 0; i < tensor_count; ++i) {
      Tensor tensor;
      if (!tensors[i].name || (tensors[i].dimensions > 0 && !tensors[i].shape))
        refuse("a tensor's name or shape is null");
      tensor.name = tensors[i].name;
      if (!names.insert(tensor.name).second) refuse("two tensors are called '" + tensor.name + "'");
      for (std::size_t d = 0; d < tensors[i].dimensions; ++d) {
        const std::int64_t length = tensors[i].shape[d];
        constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
        if (length < 1 || length > kMost / static_cast<std::int64_t>(tensor.numel))
          refuse("tensor '" + tensor.name + "' has no elements, or more than 2^31 - 1");
        tensor.shape.push_back(length);
        tensor.numel *= static_cast<std::size_t>(length);
      }
      compressor->tensors.push_back(std::move(tensor));
    }
    compressor->place = place_of(compressor->settings.device, rank);
    const std::shared_ptr<void> entered = compressor->place->enter();
    make_parts(*compressor);
    *made = compressor.release();
    return TOPKNOT_OK;
  });
}

void topknot_destroy(topknot_compressor* compressor) {
  if (!compressor) return;
  guarded([&] {
    const std::unique_ptr<topknot_compressor> gone(compressor);
    const std::shared_ptr<void> entered = gone->place->enter();
    gone->rounds.clear();
    gone->parts.clear();
    return TOPKNOT_OK;
  });
}

topknot_result topknot_encode(topknot_compressor* compressor, const topknot_step* step, const int32_t* which,
                              size_t count, const void* const* gradients, topknot_type type, double scale,
                              topknot_round** made) {
  return locked(compressor, [&] {
    if (count == 0) refuse("there is no tensor to encode");
    if (!step || !which || !gradients || !made) refuse("an argument is null");
    if (type < TOPKNOT_FLOAT32 || type > TOPKNOT_FLOAT16) refuse("a type that is none of topknot_type");
    if (step->step < 0) refuse("steps count from 0; there is no step " + std::to_string(step->step));
    const LibrarySettings& settings = compressor->settings;
    StepContext context;
    context.step = step->step;
    context.density = step->density == 0 ? settings.density : step->density;
    context.rank = compressor->rank, context.lr = step->lr;
    context.weights = compressor->weights;
    if (!(context.density > 0 && context.density <= 1))
      refuse("the step's density must be above 0, at most 1, not " + short_text(context.density));
    if (settings.whole && count != compressor->tensors.size())
      refuse("with scope=model a round has all tensors");

    topknot_round round;
    round.owner = compressor;
    for (std::size_t i = 0; i < count; ++i) {
      const Tensor& tensor = tensor_at(*compressor, which[i]);
      const auto t = static_cast<std::size_t>(which[i]);
      if (settings.whole && t != i) refuse("with scope=model a round has all tensors, in order");
      if (!gradients[i] || !is_aligned(gradients[i], type))
        refuse("the gradient of '" + tensor.name +
               "' is null, or its address no multiple of its type's size");
      if (compressor->parts[tensor.part].busy ||
          std::find(round.tensors.begin(), round.tensors.end(), t) != round.tensors.end())
        refuse("tensor '" + tensor.name + "' is in a round that is not committed or discarded yet");
      round.tensors.push_back(t);
      if (std::find(round.parts.begin(), round.parts.end(), tensor.part) == round.parts.end())
        round.parts.push_back(tensor.part);
    }
    Place& place = *compressor->place;
    for (std::size_t i = 0; i < count; ++i) {
      const Tensor& tensor = compressor->tensors[round.tensors[i]];
      place.read(gradients[i], type, static_cast<float>(scale),
                 compressor->parts[tensor.part].gradient.span().subspan(tensor.offset, tensor.numel));
    }
    context = place.begin(round, context);
    round.messages.resize(round.parts.size());
    std::size_t begun = 0;
    try {
      for (const std::size_t p : round.parts) {
        Part& part = compressor->parts[p];
        if (settings.undo) {
          Floats residual = place.zeros(part.keeps_memory ? part.spec.numel : 0);
          place.copy(part.residual.span().data(), residual.span().data(), residual.span().size());
          part.before_round = {step->step, std::move(residual), part.compressor->state()};
        }
        round.messages[begun] =
            part.compressor->encode({part.gradient.span(), part.residual.span()}, context);
        ++begun;
      }
      pack(round);
      compressor->rounds.push_back(std::move(round));
    } catch (...) {
      for (std::size_t i = 0; i < begun; ++i) place.discard(compressor->parts[round.parts[i]], round);
      throw;
    }
    *made = &compressor->rounds.back();
    for (const std::size_t p : (*made)->parts) compressor->parts[p].busy = true;
    return TOPKNOT_OK;
  });
}

topknot_result topknot_set_weights(topknot_compressor* compressor, const double* weights) {
  return locked(compressor, [&] {
    const auto ranks = static_cast<std::size_t>(weights ? compressor->ranks : 0);
    double sum = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      if (!(weights[r] > 0 && weights[r] <= 1e30))
        refuse("weights are numbers above 0, not " + short_text(weights[r]));
      sum += weights[r];
    }
    std::vector<float> scaled(ranks);
    for (std::size_t r = 0; r < ranks; ++r)
      if (scaled[r] = static_cast<float>(weights[r] * static_cast<double>(ranks) / sum); !(scaled[r] > 0))
        refuse("weight " + short_text(weights[r]) + " is too small beside the others");
    compressor->weights = std::move(scaled);
    return TOPKNOT_OK;
  });
}

topknot_result topknot_message_of(topknot_round* round, topknot_message* message) {
  return locked_round(round, [&] {
    if (!message) refuse("an argument is null");
    if (round->state != TOPKNOT_MORE) refuse("the round has nothing more to send");
    *message = round->message;
    return TOPKNOT_OK;
  });
}

topknot_result topknot_pieces_of(topknot_round* round, size_t* pieces) {
  return locked_round(round, [&] {
    if (!pieces) refuse("an argument is null");
    if (round->state != TOPKNOT_MORE) refuse("the round has nothing more to send");
    *pieces = round->pieces;
    return TOPKNOT_OK;
  });
}

topknot_result topknot_decode(topknot_round* round, const void* const* blocks, const size_t* block_bytes) {
  return locked_round(round, [&] { return decode(*round, blocks, block_bytes); });
}

topknot_result topknot_sent_of(topknot_round* round, size_t i, topknot_sent* sent) {
  return locked_round(round, [&] {
    if (!sent) refuse("an argument is null");
    if (i >= round->tensors.size()) refuse("the round has no tensor " + std::to_string(i));
    const topknot_compressor& owner = *round->owner;
    if (owner.settings.device != "cpu") refuse("topknot_sent_of() is for compressors of the CPU");
    const Compressor& compressor = *owner.parts[owner.tensors[round->tensors[i]].part].compressor;
    const Compressor::Diagnostics diagnostics = compressor.diagnostics();
    *sent = {.target = diagnostics.target,
             .count = diagnostics.selected,
             .over_capacity = diagnostics.over_capacity,
             .threshold = diagnostics.threshold,
             .indices = nullptr,
             .values = nullptr,
             .entries = 0};
    if (round->state != TOPKNOT_DONE) return TOPKNOT_OK;
    if (const std::optional<SparseView> own = compressor.contributed()) {
      static constexpr std::uint32_t no_index = 0;  // of lists that are known and empty
      static constexpr float no_value = 0;
      sent->entries = own->values.size();
      sent->values = own->values.empty() ? &no_value : own->values.data();
      sent->indices = own->values.empty() ? &no_index : own->indices.data();
      if (own->indices.empty() && !own->values.empty()) sent->indices = nullptr;
    }
    return TOPKNOT_OK;
  });
}

topknot_result topknot_commit(topknot_round* round, void* const* averages, topknot_type type, double scale) {
  return locked_round(round, [&] {
    topknot_compressor& compressor = *round->owner;
    if (round->state != TOPKNOT_DONE || !averages || type < TOPKNOT_FLOAT32 || type > TOPKNOT_FLOAT16 ||
        !std::all_of(averages, averages + round->tensors.size(),
                     [&](const void* average) { return is_aligned(average, type); })) {
      const bool bad = round->state == TOPKNOT_NOT_FINITE;
      end(compressor, round, true);
      refuse(bad ? "the step is not finite: it can only be discarded"
                 : "commit() of a round that is not decoded, or without averages or a type, or with an "
                   "average whose address is no multiple of its type's size; it is discarded");
    }
    bool committed = false;
    try {
      for (const std::size_t p : round->parts) {
        Part& part = compressor.parts[p];
        const std::span<float> average = part.compressor->commit({});
        if (average.data() == part.residual.span().data()) std::swap(part.gradient, part.residual);
      }
      committed = true;
      for (std::size_t i = 0; i < round->tensors.size(); ++i) {
        if (!averages[i]) continue;
        const Tensor& tensor = compressor.tensors[round->tensors[i]];
        compressor.place->write(
            compressor.parts[tensor.part].gradient.span().subspan(tensor.offset, tensor.numel),
            static_cast<float>(scale), type, averages[i]);
      }
      compressor.place->finish();
    } catch (...) {
      end(compressor, round, !committed);
      throw;
    }
    end(compressor, round, false);
    return topknot_result(TOPKNOT_OK);
  });
}

void topknot_discard(topknot_round* round) {
  if (!round) return;
  locked_round(round, [&] {
    end(*round->owner, round, true);
    return TOPKNOT_OK;
  });
}

topknot_result topknot_undo(topknot_compressor* compressor, int64_t step) {
  return locked(compressor, [&] {
    require_no_round(*compressor);
    if (!compressor->settings.undo) refuse("topknot_undo() needs key undo=true");
    if (step < 0) refuse("steps count from 0; there is no step " + std::to_string(step));
    undo(*compressor, step);
    return TOPKNOT_OK;
  });
}

topknot_result topknot_save(topknot_compressor* compressor, void* to, size_t room, size_t* bytes) {
  return locked(compressor, [&] {
    if (!bytes || (!to && room > 0)) refuse("an argument is null");
    require_no_round(*compressor);
    const std::vector<std::byte> state = saved(*compressor);
    *bytes = state.size();
    if (room >= state.size()) std::memcpy(to, state.data(), state.size());
    return TOPKNOT_OK;
  });
}

topknot_result topknot_load(topknot_compressor* compressor, const void* from, size_t bytes) {
  return locked(compressor, [&] {
    if (!from) refuse("an argument is null");
    require_no_round(*compressor);
    load(*compressor, {static_cast<const std::byte*>(from), bytes});
    return TOPKNOT_OK;
  });
}

topknot_result topknot_residual(topknot_compressor* compressor, int32_t which, float* residual, int* has) {
  return locked(compressor, [&] {
    if (!residual || !has) refuse("an argument is null");
    require_no_round(*compressor);
    const Tensor& tensor = tensor_at(*compressor, which);
    const Part& part = compressor->parts[tensor.part];
    *has = part.has_residual;
    if (*has) compressor->place->copy(part.residual.span().data() + tensor.offset, residual, tensor.numel);
    return TOPKNOT_OK;
  });
}

topknot_result topknot_set_residual(topknot_compressor* compressor, int32_t which, const float* residual) {
  return locked(compressor, [&] {
    if (!residual) refuse("an argument is null");
    require_no_round(*compressor);
    const Tensor& tensor = tensor_at(*compressor, which);
    const Part& part = compressor->parts[tensor.part];
    if (!part.has_residual)
      refuse("tensor '" + tensor.name + "' has no residual: nothing of it stays unsent");
    if (!std::all_of(residual, residual + tensor.numel, [](float x) { return std::isfinite(x); }))
      refuse("the residual of '" + tensor.name + "' has a number that is not finite");
    compressor->place->copy(residual, part.residual.span().data() + tensor.offset, tensor.numel);
    return TOPKNOT_OK;
  });
}
