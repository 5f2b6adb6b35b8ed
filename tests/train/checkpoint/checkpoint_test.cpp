// A checkpoint on disk is complete or absent, whatever happens while it is written, and no changed byte
// passes.
#include "train/checkpoint/checkpoint.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "nn/base/checksum.h"
#include "tests/support/child.h"
#include "tests/support/test.h"
#include "tests/support/threads.h"
#include "train/checkpoint/checkpointer.h"

using namespace topknot;

namespace {

std::vector<float> numbers(std::size_t count, float first) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// Writes a checkpoint of two ranks, whose numbers depend on the step.
void save(const CheckpointStore& store, std::int64_t step) {
  const std::vector<float> values = numbers(50, static_cast<float>(step));
  const auto tensor = [&](const std::string& name) {
    return std::vector<TensorView>{{name, "F32", {5, 10}, std::as_bytes(std::span(values))}};
  };
  Manifest manifest;
  manifest.position.step = step;
  manifest.ranks = 2;
  manifest.config = {{"optimizer.lr", "0.1"}, {"model.name", "mlp"}};
  manifest.files.push_back(store.write(step, kModelFile, tensor("w"), {{"format", "pt"}}));
  manifest.files.push_back(store.write(step, kOptimizerFile, tensor("0.w")));
  for (int r = 0; r < 2; ++r) manifest.files.push_back(store.write(step, rank_file(r), tensor("residual.w")));
  store.publish(step, manifest);
}

// Throws UserError where anything of a checkpoint is damaged.
void verify(const CheckpointStore& store, std::int64_t step) {
  const Manifest manifest = store.manifest(step);
  REQUIRE(manifest.files.size() == 4);
  for (const CheckpointFile& file : manifest.files) {
    const SafetensorsFile tensors = SafetensorsFile::parse(store.read(step, file), file.name);
    const std::vector<float> expected = numbers(50, static_cast<float>(step));
    const auto bytes = std::as_bytes(std::span(expected));
    REQUIRE(tensors.tensors().size() == 1);
    REQUIRE(std::equal(bytes.begin(), bytes.end(), tensors.tensors()[0].data.begin()));
  }
}

std::size_t entries(const std::string& directory) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
}

}  // namespace

TEST_CASE("a checkpoint reads back, and replaces an earlier one of its step") {
  const TempFolder temp;
  const CheckpointStore store(temp.at("checkpoints"));
  CHECK(store.steps().empty());
  for (const std::int64_t step : std::vector<std::int64_t>{10, 2, 1'000'000'000'000, 10}) save(store, step);
  CHECK(store.steps() == std::vector<std::int64_t>{2, 10, 1'000'000'000'000});
  for (const std::int64_t step : store.steps()) verify(store, step);
  store.remove(10);
  CHECK(store.steps() == std::vector<std::int64_t>{2, 1'000'000'000'000});
  CHECK(entries(store.directory()) == 2);
}

TEST_CASE("ranks of a host without rank 0's files publish them together, and nobody's is lost") {
  const TempFolder temp;
  const std::vector<float> values = numbers(50, 1);
  const std::vector<TensorView> tensor = {{"residual.w", "F32", {5, 10}, std::as_bytes(std::span(values))}};
  constexpr int kRanks = 4;
  for (std::int64_t step = 1; step <= 50; ++step) {
    // Every third step was there before, from a run that an earlier checkpoint was resumed of.
    const CheckpointStore store(temp.at("checkpoints"));
    for (int again = step % 3 == 0; again >= 0; --again) {
      for (int r = 0; r < kRanks; ++r) store.write(step, rank_file(r), tensor);
      const auto errors = testing::errors_of_threads(kRanks, [&](int) {
        store.publish_rank_files(step);
        if (step > 1) store.remove(step - 1);
      });
      CHECK(errors == std::vector<std::string>(kRanks));
      for (int r = 0; r < kRanks; ++r) CHECK(fs::exists(store.path(step) + "/" + rank_file(r)));
    }
    CHECK(entries(store.directory()) == 1);
  }
}

TEST_CASE("a checkpoint whose evaluation came later says so, and is as readable as before") {
  const TempFolder temp;
  const CheckpointStore store(temp.at("checkpoints"));
  save(store, 7);
  TrainingPosition position = store.manifest(7).position;
  position.evaluated = true, position.evaluation = {1.5, 0.25};
  store.evaluated(7, position, 99);
  const Manifest manifest = store.manifest(7);
  CHECK(manifest.position.evaluated);
  CHECK(manifest.position.evaluation.accuracy == 0.25);
  CHECK(manifest.metrics_bytes == 99);
  verify(store, 7);
  CHECK(entries(store.path(7)) == 5);
}

TEST_CASE("a manifest keeps every field, the loss of a skipped step included") {
  Manifest manifest;
  manifest.position = {7, 2, 1, 0.1 + 0.2, 3, true, {1.5, 0.25}, {}, 0, {}};
  manifest.ranks = 4, manifest.program = "p", manifest.metrics_bytes = 99;
  manifest.parameter_checksum = "00ff", manifest.config = {{"a", "1"}};
  manifest.data = {{"the number of training samples", "32"}};
  manifest.files = {{"x", 5, 0xfedcba9876543210u}};
  const Manifest back = parse_manifest(manifest_text(manifest), "m");
  CHECK(manifest_text(back) == manifest_text(manifest));
  CHECK(back.position.epoch_loss == 0.1 + 0.2);
  CHECK(back.position.epoch_loss_steps == 3);
  CHECK(back.position.evaluation.accuracy == 0.25);
  CHECK(back.files == manifest.files);
  CHECK(back.data == manifest.data);
  manifest.position.epoch_loss = std::nan("");
  CHECK(std::isnan(parse_manifest(manifest_text(manifest), "m").position.epoch_loss));
}

TEST_CASE("a manifest with a whole number that fits no integer, or nested a million times, is refused") {
  const std::string begin = "{\"checksum\":\"0\",\"manifest\":{\"format\":";
  for (const std::string number : {"1e300", "1.5", "4294967297", "18446744073709551616", "\"1\""})
    CHECK_USER_ERROR(parse_manifest(begin + number + "}}\n", "m"), "m: ", "damaged", "out of range");
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  CHECK_USER_ERROR(parse_manifest(begin + "1,\"config\":" + deep + "}}\n", "m"), "m: ", "damaged");
}

TEST_CASE("the checksum does not depend on the pieces, and every byte and the length count") {
  std::vector<std::byte> bytes(37);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
  const auto checksum = [](std::span<const std::byte> all, std::size_t piece) {
    Checksum sum;
    for (; !all.empty(); all = all.subspan(std::min(piece, all.size())))
      sum.update(all.first(std::min(piece, all.size())));
    return sum.value();
  };
  const std::uint64_t whole = checksum(bytes, bytes.size());
  for (std::size_t piece = 1; piece < 12; ++piece) CHECK(checksum(bytes, piece) == whole);
  for (std::byte& byte : bytes) {
    byte ^= std::byte{0x80};
    CHECK(checksum(bytes, 5) != whole);
    byte ^= std::byte{0x80};
  }
  bytes.push_back(std::byte{0});
  CHECK(checksum(bytes, 5) != whole);
}

TEST_CASE("each byte of a checkpoint flipped once: it is refused, and the file is named") {
  const TempFolder temp;
  const CheckpointStore store(temp.at("checkpoints"));
  save(store, 3);
  std::size_t flips = 0;
  for (const auto& entry : fs::directory_iterator(store.path(3))) {
    const std::string path = entry.path().string(), bytes = text_of(path),
                      name = entry.path().filename().string();
    for (std::size_t i = 0; i < bytes.size(); ++i, ++flips) {
      std::string flipped = bytes;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
      std::ofstream(path, std::ios::binary) << flipped;
      if (!user_error([&] { verify(store, 3); }, {name})) FAIL(name << ", byte " << i);
    }
    std::ofstream(path, std::ios::binary) << bytes.substr(0, bytes.size() - 1);
    CHECK_USER_ERROR(verify(store, 3), name);
    std::ofstream(path, std::ios::binary) << bytes;
  }
  verify(store, 3);
  CHECK(flips > 1500);
}

TEST_CASE("what has an unfinished checkpoint's name is replaced, and a link in its place not followed") {
  const TempFolder temp;
  temp.write("victim", {'m', 'y'});
  const CheckpointStore store(temp.at("checkpoints"));
  const std::string partial = store.path(3) + ".partial";
  fs::create_directories(partial);
  fs::create_symlink(temp.at("victim"), partial + "/" + kModelFile);
  save(store, 3);
  verify(store, 3);
  fs::create_symlink(temp.at("victim"), store.path(3) + "/manifest.json.partial");
  store.evaluated(3, store.manifest(3).position, 7);
  CHECK(store.manifest(3).metrics_bytes == 7);
  CHECK(text_of(temp.at("victim")) == "my");
  fs::create_directory(temp.at("elsewhere"));
  fs::create_directory_symlink(temp.at("elsewhere"), store.path(4) + ".partial");
  CHECK_USER_ERROR(save(store, 4), ".partial: is a link");
  CHECK(fs::is_empty(temp.at("elsewhere")));
}

TEST_CASE("special files in a checkpoint's place are refused before they are opened") {
  const TempFolder temp;
  const CheckpointStore store(temp.at("checkpoints"));
  save(store, 3);
  const Manifest manifest = store.manifest(3);
  for (const std::string name : {kModelFile, "manifest.json"}) {
    const std::string path = store.path(3) + "/" + name;
    fs::remove(path);
    REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  }
  CHECK_USER_ERROR(store.manifest(3), "manifest.json", "a named pipe");
  CheckpointFile empty = file_of(manifest, kModelFile);
  CHECK_USER_ERROR(store.read(3, empty), kModelFile);
  CHECK_USER_ERROR(SafetensorsFile::read(store.path(3) + "/" + kModelFile), "a named pipe");
}

TEST_CASE("1000 writes that fail at a random byte leave no checkpoint that cannot be read") {
  const TempFolder temp;
  const std::string directory = temp.at("checkpoints");
  const CheckpointStore sound(directory);
  save(sound, 0);
  const std::size_t whole = [&] {
    std::size_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(sound.path(0))) bytes += entry.file_size();
    return bytes;
  }();
  std::mt19937 random(1);
  int completed = 0, killed = 0;
  for (int i = 1; i <= 1000; ++i) {
    // A little beyond the end, so that some succeed.
    std::size_t left = std::uniform_int_distribution<std::size_t>(0, whole + whole / 20)(random);
    const int kind = i % 3;  // a full disk, a full disk after a short write, a kill
    const CheckpointStore failing(directory, [&](int fd, const void* data, std::size_t size) -> ssize_t {
      if (size <= left) {
        left -= size;
        return ::write(fd, data, size);
      }
      if (kind == 0) return errno = ENOSPC, -1;
      const std::size_t part = std::exchange(left, 0);
      if (part > 0 && ::write(fd, data, part) != static_cast<ssize_t>(part)) _exit(2);
      if (kind == 2) _exit(1);
      return part > 0 ? static_cast<ssize_t>(part) : (errno = ENOSPC, -1);
    });
    bool saved = true;
    if (kind == 2) {
      const int code = testing::code_of(testing::start_process([&] { save(failing, i); }));
      REQUIRE(code < 2);
      saved = code == 0;
      killed += !saved;
    } else {
      const std::string error = error_text<UserError>([&] { save(failing, i); });
      saved = error.empty();
      if (!saved) CHECK(contains(error, "No space left"));
    }
    completed += saved;
    const auto steps = sound.steps();
    REQUIRE(!steps.empty());
    CHECK((steps.back() == i) == saved);
    for (const std::int64_t step : steps) verify(sound, step);
    for (std::size_t s = 0; s + 1 < steps.size(); ++s) sound.remove(steps[s]);
  }
  CHECK(completed > 10);
  CHECK(killed > 250);
  CHECK(entries(directory) > 1);
  sound.remove_partial();
  CHECK(entries(directory) == 1);
}

TEST_CASE("the last checkpoints and the best are kept") {
  const auto at = [](std::int64_t step, double accuracy, double loss = 1) {
    return SavedCheckpoint{step, true, {loss, accuracy}};
  };
  using Steps = std::vector<std::int64_t>;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(superseded({}, 1) == Steps{});
  CHECK(superseded({at(1, 0.5)}, 1) == Steps{});
  CHECK(superseded({at(1, 0.5), at(2, 0.7), at(3, 0.6), at(4, 0.6)}, 2) == Steps{1});
  CHECK(superseded({at(1, 0.5), at(2, 0.7), at(3, 0.6), at(4, 0.6)}, 1) == Steps{1, 3});
  CHECK(superseded({at(1, 0.5), at(2, 0.5), at(3, 0.4)}, 1) == Steps{1});  // the latest of equals
  CHECK(superseded({at(1, 0.9), {2, false, {}}, {3, false, {}}}, 1) == Steps{2});
  // Without an accuracy the loss decides; no number is never the best.
  CHECK(superseded({at(1, 0, 0.3), at(2, 0, 0.2), at(3, 0, 0.4), at(4, 0, 0.5)}, 1) == Steps{1, 3});
  CHECK(superseded({at(1, 0, 0.3), at(2, 0, nan), at(3, 0, nan)}, 1) == Steps{2});
  CHECK(superseded({at(1, 0, nan), at(2, 0, 0.3), at(3, 0, 0.4)}, 1) == Steps{1});
  CHECK(superseded({at(1, 0.9, nan), at(2, 0.5), at(3, 0.4)}, 1) == Steps{2});
}
