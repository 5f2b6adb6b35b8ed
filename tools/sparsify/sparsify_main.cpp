// sparsify INPUT.npy --compressor NAME [--density R] [key=value ...] --out OUT.jsonl

#include <cstdio>
#include <iostream>
#include <new>

#include "compress/compressor.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "tools/common/options.h"
#include "tools/sparsify/sparsify.h"

using namespace topknot;

namespace {

constexpr const char* kText =
    "sparsify: any compressor on any gradients.\n\n"
    "  sparsify INPUT.npy --compressor NAME [--density R] [key=value ...] --out OUT.jsonl\n\n"
    "INPUT is float32 (float64 is rounded), in C order, of shape [d], [steps, d] or [steps, ranks, d]. "
    "Residuals and\n"
    "momenta are carried from step to step. OUT gets one JSON line per step and rank (step, rank, count,\n"
    "threshold, indices, values, bytes_up) and one per step for the average (indices, values, bytes_down,\n"
    "dense_bytes). A line on standard error sums it up.\n\n"
    "  --compressor NAME   which method; --list shows them\n"
    "  --density R         share of the entries that is sent (default: 0.001)\n"
    "  --out FILE          where the lines go; - is standard output\n"
    "  --weights 1,2,1     relative weights of the ranks in the average (default: equal)\n"
    "  --tensors SHAPES    what the vector consists of, such as 64x27,64,10x64: for low-rank methods and "
    "scope=tensor\n"
    "  key=value           any key of section compress ('train --list keys'), with or without 'compress.',\n"
    "                      and seed, momentum, nesterov, lr\n"
    "  --list              the compressors, one per line\n\n"
    "Examples:\n"
    "  sparsify g.npy --compressor topk --density 0.01 --out g.jsonl\n"
    "  sparsify g.npy --compressor regtopk mu=4 --weights 1,1,1,2 --out -\n"
    "  sparsify g.npy --compressor topk memory=dgc momentum=0.9 codec=rice values=int8 --out g.jsonl\n"
    "  sparsify g.npy --compressor powersgd rank=2 --tensors 256x64,256,10x256,10 --out g.jsonl\n";

void list_compressors() {
  for (const std::string& name : compressors().names())
    std::cout << name << "  " << compressors().help(name) << "\n";
}

int run(int argc, char** argv) {
  SparsifyOptions options;
  std::vector<std::string> arguments;
  std::string density, tensors;
  bool list = false;
  CLI::App app("sparsify");
  app.add_flag("--list", list);
  app.add_option("--compressor", options.compressor);
  app.add_option("--density", density);
  app.add_option("--out", options.out);
  app.add_option("--weights", options.weights);
  app.add_option("--tensors", tensors);
  app.add_option("arguments", arguments);
  if (!parse_options(app, kText, argc, argv)) return 0;
  if (list) {
    list_compressors();
    std::cout.flush();
    return 0;
  }
  if (arguments.empty()) misuse("sparsify", "no input given");
  if (options.compressor.empty())
    misuse("sparsify", "--compressor is missing ('sparsify --list' shows them)");
  if (options.out.empty()) misuse("sparsify", "--out is missing (- is standard output)");
  options.input = arguments[0];
  options.settings.assign(arguments.begin() + 1, arguments.end());
  if (!density.empty()) options.settings.push_back("density=" + density);
  if (!tensors.empty()) options.settings.push_back("tensors=" + tensors);
  install_stop_handlers();
  const EndAfterSignal guard("within a long step, or a read that hangs; no output was written",
                             std::chrono::seconds(5));
  try {
    const SparsifySummary summary = sparsify(options);
    for (const std::string& note : summary.notes) std::fprintf(stderr, "note: %s\n", one_line(note).c_str());
    std::fprintf(stderr, "%s\n", summary_text(summary).c_str());
  } catch (const std::bad_alloc&) {
    throw UserError("not enough memory: each rank holds two vectors of the input's length");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("sparsify", run, argc, argv);
}
