// Batches of image_folder, decoded and augmented in one thread, for a driver that alternates them with
// another loader's: prints "ready N", then for each line "K" on standard input makes K batches and prints the
// seconds of each.
#include <cstdio>
#include <iostream>
#include <string>

#include "data/loader.h"
#include "lab/common/clock.h"
#include "lab/common/options.h"
#include "nn/base/program.h"

using namespace topknot;

namespace {

constexpr const char* kUsage =
    "usage: bench_images ROOT [--batch N] [--size S] [--evaluation]\n"
    "  --batch       images per batch (64)\n"
    "  --size        height and width of a sample (224)\n"
    "  --evaluation  resized and cut in the centre, in place of a random crop\n";

int run(int argc, char** argv) {
  DatasetOptions data;
  LoaderOptions options;
  options.batch_size = 64;
  int size = 0;
  bool evaluation = false;
  CLI::App app("bench_images");
  app.add_option("root", data.root);
  app.add_option("--batch", options.batch_size);
  app.add_option("--size", size);
  app.add_flag("--evaluation", evaluation);
  if (!parse_options(app, kUsage, argc, argv)) return 0;
  data.set("image_size", size);
  options.augment = options.train = !evaluation;
  const auto dataset = make_dataset("image_folder", data, evaluation ? Split::test : Split::train);
  Loader loader(*dataset, options);
  std::printf("ready %d\n", options.batch_size);
  std::fflush(stdout);
  std::int64_t epoch = 0, left = 0;
  for (std::string line; std::getline(std::cin, line);) {
    for (int steps = std::stoi(line); steps > 0; --steps) {
      if (left == 0) {
        loader.start_epoch(epoch++);
        left = loader.steps_per_epoch() - (evaluation ? 1 : 0);  // whole batches
      }
      --left;
      std::printf("%.6f ", seconds_for([&] {
                    Batch batch;
                    loader.next(batch);
                  }));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_images", run, argc, argv);
}
