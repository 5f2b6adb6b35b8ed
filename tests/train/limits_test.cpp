#include "train/limits.h"

#include "tests/support/error_text.h"
#include "tests/train/small_run.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("a rank's memory counts the moments of its optimizer") {
  const TempFolder temp;
  const auto buffers = [&](const Keys& keys) {
    const LoadedConfig loaded = small_run(temp, keys);
    const RunData data = load_data(loaded.config);
    const double parameters =
        static_cast<double>(build_model(loaded.config, *data.train)->store.arena().size());
    return model_bytes(loaded.config, *data.train) / (4 * parameters);
  };
  CHECK(buffers({"optimizer.momentum=0"}) == 3);
  CHECK(buffers({"optimizer.momentum=0.9"}) == 4);
  CHECK(buffers({"optimizer.name=adamw"}) == 5);
}

TEST_CASE("more ranks than a machine can hold are refused with the key to lower") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {});
  const RunData data = load_data(loaded.config);
  check_limits(loaded.config, data, 2, 1);
  CHECK(user_error([&] { check_limits(loaded.config, data, 1 << 30, 1); },
                   {"dist.ranks", "this machine", "lower"}));
}
