#pragma once
// A model's tensors in a safetensors file: parameters under their names, F32, OIHW for convolutions and {out,
// in} for linear layers, and batch-norm statistics under their buffers' names.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nn/core/parameter.h"
#include "train/checkpoint/safetensors.h"

namespace topknot {

struct LoadedConfig;

// Host copies of all that a model's file holds, from any device.
struct ModelCopy {
  std::vector<float> weights;     // ParameterArena::all_weights()
  std::vector<float> statistics;  // the buffers, one after the other, in ParameterStore::buffers()'s order
};

// Views of `copy`, which must outlive them: parameters as registered, then buffers, without recurrent states.
std::vector<TensorView> model_tensors(const ParameterStore& store, const ModelCopy& copy);

// The shape as a file has it.
std::vector<std::int64_t> dimensions(const Shape& shape);

// Whether one of the shell patterns (*, ?, [...]; '*' also matches '.') matches the name or what stands
// before one of its dots: "fc" and "f*" match "fc.weight", "stage1" matches "stage1.block1.1.conv.weight". A
// pattern after '!' takes back what the patterns before it match: {"*", "!fc"} is everything but fc. The last
// one that matches counts.
bool matches_any(const std::vector<std::string>& patterns, const std::string& name);
// Throws UserError, with the key and all names, where a pattern matches none of them.
void check_patterns(const std::string& key, const std::vector<std::string>& patterns,
                    const std::vector<std::string>& names);

// Sets all tensors of the model from the file, but for those whose names match one of `reinit`: these keep
// their values, whatever the file has. A transformer's file may have Hugging Face's names and order
// (train/checkpoint/model_names.h). Throws one UserError that lists, under Topknot's names, all tensors that
// are missing, have no place in the model, or have another shape or type, or one that lists those with values
// that are not finite; the model is then unchanged.
void load_model(ParameterStore& store, const SafetensorsFile& file,
                const std::vector<std::string>& reinit = {});

// Completes a configuration by what the weights of model.init_from were made with: keys of the architecture
// that were not given take the values that the file's metadata state (of an export), or its neighbour
// (manifest.json of a checkpoint, config.json of Hugging Face). Adds a problem for each given key that differs
// and that no tensor's shape would show. A file that cannot be read is left to load_model().
void adopt_architecture(LoadedConfig& loaded);
// The same, as `stated` by `where`: keys with their values.
void adopt_architecture(LoadedConfig& loaded, const std::map<std::string, std::string>& stated,
                        const std::string& where);

// `train export RUN --to FILE.safetensors [--step N] [--names topknot|huggingface] [--overwrite]`: a
// checkpoint's weights and statistics as one file, for other programs and for model.init_from.
//
// `run`: a run directory, or one of its checkpoints' directories. `step`: that checkpoint, else the newest.
// `hugging_face`: --names huggingface, as to_hugging_face() has them. The file's metadata hold format (pt),
// topknot (version), model, step and config (the keys of the configuration that describe the model, YAML). It
// appears whole or not at all. Throws UserError: no checkpoint, a damaged one, a file that cannot be written,
// that exists if `overwrite` is false, or that lies in the checkpoints of a run; a model that Hugging Face's
// names are not for. Returns what was done, as one line.
std::string export_model(const std::string& run, const std::string& to,
                         std::optional<std::int64_t> step = std::nullopt, bool overwrite = false,
                         bool hugging_face = false);

// The subcommand; argv[0] is "export". Returns an exit code. Throws UserError for a wrong command line too.
int export_command(int argc, const char* const* argv);

}  // namespace topknot
