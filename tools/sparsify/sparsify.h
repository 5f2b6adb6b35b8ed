#pragma once
// A compressor on gradients from a .npy file, its memory carried from step to step, with the average over
// ranks; the messages as JSON lines. docs/sparsify.md describes input and output.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

struct SparsifyOptions {
  std::string input;       // .npy, [d], [steps, d] or [steps, ranks, d]
  std::string compressor;  // compress.name
  std::string out;         // "-": standard output
  // "key=value": keys of section compress, with or without the section, and seed, momentum, nesterov, lr;
  // tensors=64x27,64.
  std::vector<std::string> settings;
  std::string weights;  // "1,2,1", relative, by rank; "": equal
};

struct SparsifySummary {
  std::size_t steps = 0, skipped = 0, ranks = 0, numel = 0;
  double mean_count = 0;  // entries sent by a rank in a step that was committed
  double mean_ratio = 0;  // the same over the density's k
  // All steps and ranks.
  std::uint64_t bytes_up = 0, bytes_down = 0, dense_bytes = 0;
  std::vector<std::string> notes;  // settings without effect and the like
};

// Throws UserError for everything that is wrong with options or input, Interrupted (nn/base/program.h)
// between two steps. Nothing is left at `out` then.
SparsifySummary sparsify(const SparsifyOptions& options);

std::string summary_text(const SparsifySummary& summary);  // one line

// The options of `sparsify` as the compressors take them.

struct SparsifySetup {
  CompressOptions compress;
  GroupSpec group;
  double density = 1, lr = 1;
  double clip = 0;              // greatest norm of a rank's gradient; 0: off
  std::vector<double> weights;  // by rank, mean 1
  bool momentum_given = false, lr_given = false;
  std::vector<std::string> notes;  // settings without effect
};

// For steps of `ranks` ranks and `numel` elements. Throws UserError: unknown keys and names with a
// suggestion, values out of range, keys without meaning here, sizes and weights that do not fit.
SparsifySetup sparsify_setup(const SparsifyOptions& options, std::size_t ranks, std::size_t numel);

}  // namespace topknot
