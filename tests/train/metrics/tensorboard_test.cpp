// Event files read back by a decoder of their own, from the format's description.
#include "train/metrics/tensorboard.h"

#include "tests/train/small_run.h"

namespace topknot {
namespace {

std::uint32_t crc_32c(const std::string& bytes) {
  std::uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
  }
  return ~crc;
}

std::string take_bytes(std::string& bytes, std::uint64_t size) {
  REQUIRE(bytes.size() >= size);
  std::string taken = bytes.substr(0, size);
  bytes.erase(0, size);
  return taken;
}

template <class T>
T as(const std::string& bytes) {
  REQUIRE(bytes.size() == sizeof(T));
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}
template <class T>
T take(std::string& bytes) {
  return as<T>(take_bytes(bytes, sizeof(T)));
}

std::uint64_t take_varint(std::string& bytes) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<std::uint8_t>(bytes);
    value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
}

// A message's fields by number; repeated ones in order.
std::multimap<int, std::string> fields_of(std::string message) {
  std::multimap<int, std::string> fields;
  while (!message.empty()) {
    const std::uint64_t key = take_varint(message), type = key & 7;
    REQUIRE((type <= 2 || type == 5));
    std::string value(8, '\0');
    if (type == 0) {
      const std::uint64_t number = take_varint(message);
      std::memcpy(value.data(), &number, 8);
    } else {
      value = take_bytes(message, type == 2 ? take_varint(message) : type == 1 ? 8 : 4);
    }
    fields.emplace(static_cast<int>(key >> 3), value);
  }
  return fields;
}

struct Event {
  double wall_time = 0;
  std::uint64_t step = 0;
  std::string version;
  bool session_start = false;
  std::map<std::string, float> scalars;
};

std::vector<Event> read_events(const std::string& path) {
  std::string bytes = text_of(path);
  std::vector<Event> events;
  while (!bytes.empty()) {
    const auto masked = [](const std::string& data) {
      const std::uint32_t crc = crc_32c(data);
      return (crc >> 15 | crc << 17) + 0xa282ead8u;
    };
    const std::string length = take_bytes(bytes, 8);
    CHECK(take<std::uint32_t>(bytes) == masked(length));
    const std::string message = take_bytes(bytes, as<std::uint64_t>(length));
    CHECK(take<std::uint32_t>(bytes) == masked(message));
    Event event;
    for (const auto& [number, value] : fields_of(message)) {
      if (number == 1) event.wall_time = as<double>(value);
      if (number == 2) event.step = as<std::uint64_t>(value);
      if (number == 3) event.version = value;
      if (number == 7) event.session_start = as<std::uint64_t>(fields_of(value).find(1)->second) == 1;
      if (number != 5) continue;
      for (const auto& [one, summary] : fields_of(value)) {
        CHECK(one == 1);
        const auto scalar = fields_of(summary);
        event.scalars[scalar.find(1)->second] = as<float>(scalar.find(2)->second);
      }
    }
    events.push_back(event);
  }
  return events;
}

std::vector<std::string> event_files(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("events.out.tfevents."))
      paths.push_back(entry.path().string());
  return paths;
}

}  // namespace

TEST_CASE("an event file begins as TensorFlow's do, and its scalars read back") {
  const TempFolder temp;
  // The decoder's checksum is CRC-32C: the check value of CRC-32/ISCSI in the catalogue of Cook.
  CHECK(crc_32c("123456789") == 0xE3069283u);
  TensorBoardWriter writer(temp.str());
  writer.write(1, {{"train/loss", 2.5}, {"train/bytes_sent", 1e9}});
  writer.write(300, {{"test/accuracy", 0.1}});
  writer.write(std::int64_t{1} << 40, {});
  REQUIRE(event_files(temp.str()) == std::vector<std::string>{writer.path()});
  // Length 24 and its checksum, the time's field, then the version.
  const std::string bytes = text_of(writer.path());
  CHECK(bytes.substr(0, 13) == std::string("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x09", 13));
  CHECK(bytes.substr(21, 15) ==
        "\x1a\x0d"
        "brain.Event:2");

  const std::vector<Event> events = read_events(writer.path());
  REQUIRE(events.size() == 4);
  CHECK(events[0].version == "brain.Event:2");
  CHECK(events[0].wall_time > 1.6e9);
  CHECK(events[1].step == 1);
  CHECK(events[1].scalars == std::map<std::string, float>{{"train/loss", 2.5f}, {"train/bytes_sent", 1e9f}});
  CHECK(events[2].step == 300);
  CHECK(events[2].scalars == std::map<std::string, float>{{"test/accuracy", 0.1f}});
  CHECK(events[3].step == std::uint64_t{1} << 40);

  // A continued run's begins with the step from which on earlier files do not count.
  const TempFolder other;
  const std::vector<Event> continued = read_events(TensorBoardWriter(other.str(), 17).path());
  REQUIRE(continued.size() == 2);
  CHECK(continued[1].session_start);
  CHECK(continued[1].step == 18);
  CHECK_USER_ERROR(TensorBoardWriter writer(temp.at("no")), temp.at("no/events.out"), "No such file");
}

TEST_CASE("output.tensorboard writes every step and evaluation of a run once, as metrics.jsonl has them") {
  const TempFolder temp;
  const LoadedConfig loaded = testing::small_run(
      temp, {"output.tensorboard=true", "compress.name=topk", "dist.ranks=2", "train.max_steps=130"});
  testing::run_in_directory(loaded);
  const Metrics metrics = testing::metrics_of(temp);
  const std::vector<std::string> files = event_files(temp.at("run"));
  REQUIRE(files.size() == 1);
  std::vector<Event> events = read_events(files[0]);
  events.erase(events.begin());
  std::size_t steps = 0, evaluations = 0;
  for (const Event& event : events) {
    if (event.scalars.count("test/loss")) {
      const EvalRecord& record = metrics.evals.at(evaluations++);
      CHECK(event.step == static_cast<std::uint64_t>(record.step));
      CHECK(event.scalars.at("test/loss") == static_cast<float>(record.test.loss));
      CHECK(event.scalars.at("test/accuracy") == static_cast<float>(record.test.accuracy.value()));
      continue;
    }
    const StepRecord& record = metrics.steps.at(steps++);
    CHECK(event.step == static_cast<std::uint64_t>(record.step));
    CHECK(event.scalars == std::map<std::string, float>{
                               {"train/loss", static_cast<float>(record.loss)},
                               {"train/learning_rate", static_cast<float>(record.lr)},
                               {"train/density", static_cast<float>(record.density)},
                               {"train/bytes_sent", static_cast<float>(record.bytes_sent)},
                               {"train/images_per_second", static_cast<float>(record.images_per_second)}});
  }
  CHECK(steps == metrics.steps.size());
  CHECK(steps == 130);
  CHECK(evaluations == metrics.evals.size());
  CHECK(evaluations > 0);

  // A later run in the same folder replaces the file.
  testing::run_in_directory(loaded);
  CHECK(event_files(temp.at("run")).size() == 1);
}

}  // namespace topknot
