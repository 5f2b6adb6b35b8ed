#pragma once
// `train export RUN --to FILE.safetensors [--step N] [--overwrite]`: a checkpoint's weights and statistics as one file, for
// other programs and for model.init_from.

#include <cstdint>
#include <optional>
#include <string>

namespace topknot {

// `run`: a run directory, or one of its checkpoints' directories. `step`: that checkpoint, else the newest. The file's
// metadata hold format (pt), topknot (version), model, step and config (the keys of the configuration that describe the model,
// YAML). It appears whole or not at all. Throws UserError: no checkpoint, a damaged one, a file that cannot be written, that
// exists where `overwrite` is false, or that lies in the checkpoints of a run. Returns what was done, as one line.
std::string export_model(const std::string& run, const std::string& to,
                         std::optional<std::int64_t> step = std::nullopt, bool overwrite = false);

// The subcommand; argv[0] is "export". Returns an exit code. Throws UserError for a wrong command line too.
int export_command(int argc, const char* const* argv);

}  // namespace topknot
