// Calls of libtopknot that fail change nothing: without memory, where each allocation of each call fails in turn, and with
// numbers that are not finite. The call made again has the bits of one that was never disturbed.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/library/library_fixture.h"

namespace {

// How many allocations succeed before one fails; below 0: all do. Of all threads: an exception in a loop of OpenMP's would
// end the program.
std::atomic<long> left{-1};

bool fails() {
  return left.load() >= 0 && left.fetch_sub(1) == 0;
}

void* allocated(std::size_t size, std::size_t alignment) {
  void* const memory = fails() ? nullptr : std::aligned_alloc(alignment, (size / alignment + 1) * alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) {
  return allocated(size, alignof(std::max_align_t));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocated(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

// Of residuals and gradients. A sanitizer has its own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" void* __libc_calloc(std::size_t, std::size_t);
extern "C" void* calloc(std::size_t count, std::size_t size) noexcept {
  return fails() ? nullptr : __libc_calloc(count, size);
}
#endif

namespace topknot {
namespace {

using namespace topknot::testing;

using State = std::vector<char>;

struct Case {
  std::string method;
  std::vector<std::string> keys;
  std::int64_t rows = 24;  // of the first tensor, whose rows have 20 elements
};

// Calls until no allocation fails. After each failure `unchanged` looks at what must be as before.
template <class Call, class Unchanged>
topknot_result until_it_succeeds(const Call& call, const Unchanged& unchanged) {
  for (long n = 0;; ++n) {
    left = n;
    const topknot_result result = call();
    left = -1;
    if (result < TOPKNOT_INVALID) return result;
    INFO("allocation " << n);
    REQUIRE(result == TOPKNOT_FAILED);
    REQUIRE(std::string(topknot_error()) == "out of memory");
    unchanged();
  }
}

// Two ranks, of which the first one's calls may lack memory.
class Ranks {
 public:
  explicit Ranks(const Case& what, bool failing)
      : lengths_{static_cast<std::size_t>(what.rows) * 20, 30, 264} {
    const std::vector<std::int64_t> shapes[] = {{what.rows, 20}, {30}, {12, 22}};
    std::vector<const char*> keys;
    for (const std::string& key : what.keys) keys.push_back(key.c_str());
    const topknot_tensor tensors[] = {
        {"a", shapes[0].data(), 2}, {"b", shapes[1].data(), 1}, {"c", shapes[2].data(), 2}};
    for (int rank = 0; rank < 2; ++rank) {
      topknot_compressor* made = nullptr;
      const auto create = [&] {
        return topknot_create(what.method.c_str(), keys.data(), keys.size(), tensors, 3, rank, 2, &made);
      };
      if (failing)
        REQUIRE(until_it_succeeds(create, [&] { CHECK(made == nullptr); }) == TOPKNOT_OK);
      else if (create() != TOPKNOT_OK)
        FAIL(topknot_error());
      ranks_[rank].reset(made);
    }
  }
  const Handle& operator[](std::size_t rank) const { return ranks_[rank]; }

  // The averages. `failing`: the first rank's calls until they have memory.
  Vectors step(std::int64_t number, bool failing) {
    const State before = failing ? state_of(ranks_[0].get()) : State();
    topknot_round* rounds[2] = {};
    exchanged_.clear();
    if (failing) {
      REQUIRE(until_it_succeeds([&] { return encode(0, number, rounds[0]); },
                                [&] {
                                  CHECK(rounds[0] == nullptr);
                                  REQUIRE((state_of(ranks_[0].get()) == before));
                                }) == TOPKNOT_OK);
      left = 0;
      topknot_discard(rounds[0]);
      left = -1;
      REQUIRE((state_of(ranks_[0].get()) == before));
    }
    for (std::size_t rank = 0; rank < 2; ++rank) REQUIRE(encode(rank, number, rounds[rank]) == TOPKNOT_OK);
    topknot_result state = TOPKNOT_MORE;
    while (state == TOPKNOT_MORE) {
      exchange(rounds);
      const auto again = [&] {  // the round can only be discarded: as far as it was, in a new one
        topknot_discard(rounds[0]);
        REQUIRE((state_of(ranks_[0].get()) == before));
        REQUIRE(encode(0, number, rounds[0]) == TOPKNOT_OK);
        for (std::size_t i = 0; i + 1 < exchanged_.size(); ++i)
          REQUIRE(decode(rounds[0], exchanged_[i]) == TOPKNOT_MORE);
      };
      const auto first = [&] { return decode(rounds[0], exchanged_.back()); };
      state = failing ? until_it_succeeds(first, again) : first();
      REQUIRE(decode(rounds[1], exchanged_.back()) == state);
    }
    REQUIRE(state == TOPKNOT_DONE);
    Vectors averages[2];
    for (std::size_t rank = 0; rank < 2; ++rank) {
      std::vector<void*> to;
      for (const std::size_t n : lengths_) averages[rank].emplace_back(n);
      for (auto& average : averages[rank]) to.push_back(average.data());
      left = failing && rank == 0 ? 0 : -1;
      const topknot_result committed = topknot_commit(rounds[rank], to.data(), TOPKNOT_FLOAT32, 1);
      left = -1;
      REQUIRE(committed == TOPKNOT_OK);  // it allocates nothing, and so no tensor is left behind the others
    }
    return averages[0];
  }

 private:
  using Exchanged = std::vector<Bytes>;  // by rank, or the sum

  topknot_result encode(std::size_t rank, std::int64_t number, topknot_round*& round) {
    static Vectors gradients;
    static const void* from[3];
    const long armed = left.exchange(-1);
    gradients.clear();
    for (std::size_t t = 0; t < 3; ++t)
      gradients.push_back(gradient_of(3 * number + 1, rank + t, lengths_[t]));
    for (std::size_t t = 0; t < 3; ++t) from[t] = gradients[t].data();
    const topknot_step step{number, 0.05, 0.1};
    const std::int32_t which[] = {0, 1, 2};
    round = nullptr;
    left = armed;
    return topknot_encode(ranks_[rank].get(), &step, which, 3, from, TOPKNOT_FLOAT32, 1, &round);
  }

  void exchange(topknot_round* const (&rounds)[2]) {
    const topknot_message messages[] = {message_of(rounds[0]), message_of(rounds[1])};
    Exchanged all;
    if (messages[0].sum) {
      REQUIRE(messages[0].sum_count == messages[1].sum_count);
      const auto *a = static_cast<const float*>(messages[0].sum),
                 *b = static_cast<const float*>(messages[1].sum);
      std::vector<float> sum(messages[0].sum_count);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = a[i] + b[i];
      all.push_back(bytes_of(sum));
    } else {
      for (const topknot_message& message : messages)
        all.push_back(HostMemory::read(message.block, message.block_bytes));
    }
    exchanged_.push_back(all);
  }

  static topknot_result decode(topknot_round* round, const Exchanged& all) {
    if (all.size() > 1) {
      const void* blocks[] = {all[0].data(), all[1].data()};
      const std::size_t sizes[] = {all[0].size(), all[1].size()};
      return topknot_decode(round, blocks, sizes);
    }
    topknot_message message;
    if (const topknot_result result = topknot_message_of(round, &message); result != TOPKNOT_OK)
      return result;
    std::memcpy(message.sum, all[0].data(), all[0].size());
    return topknot_decode(round, nullptr, nullptr);
  }

  std::vector<std::size_t> lengths_;
  Handle ranks_[2];
  std::vector<Exchanged> exchanged_;  // of the step, message by message
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string& method : methods()) {
    Case made{method, {"undo=true"}};
    if (method == "dgc") made.keys.push_back("momentum=0.9");
    if (method == "threshold") made.keys.push_back("threshold=0.5");
    if (method == "acpsgd" || method == "powersgd") made.keys.push_back("min_compression=1.0");
    all.push_back(made);
  }
  const auto pieces = [&](const std::string& key, const std::vector<std::string>& names) {
    for (const std::string& name : names) all.push_back({"topk", {"undo=true", key + "=" + name}});
  };
  pieces("codec", index_codecs().names());
  pieces("values", value_codecs().names());
  pieces("memory", {"none", "ef21"});
  pieces("transform", {"dct"});
  pieces("scope", {"model"});
  pieces("aggregate", {"contributors"});
  pieces("capacity", {"1"});
  // By two threads.
  all.push_back({"topk", {"undo=true", "threads=2", "codec=ans"}, 7000});
  all.push_back({"qsgd", {"undo=true", "threads=2", "memory=residual"}, 7000});
  return all;
}

TEST_CASE("a call of the library that lacks memory changes nothing, and has the same bits when made again") {
  for (const Case& what : cases()) {
    INFO(what.method << ", " << what.keys.back());
    Ranks ranks(what, true), undisturbed(what, false);
    for (std::int64_t number = 0; number < (what.rows > 24 ? 1 : 3); ++number) {
      const State before = state_of(ranks[0].get());
      REQUIRE((ranks.step(number, true) == undisturbed.step(number, false)));
      const State after = state_of(ranks[0].get());
      REQUIRE((after == state_of(undisturbed[0].get())));
      std::size_t bytes = 0;
      State saved(after.size());
      CHECK(until_it_succeeds(
                [&] { return topknot_save(ranks[0].get(), saved.data(), saved.size(), &bytes); }, [] {}) ==
            TOPKNOT_OK);
      CHECK((saved == after));
      const auto as_after = [&] { REQUIRE((state_of(ranks[0].get()) == after)); };
      CHECK(until_it_succeeds([&] { return topknot_undo(ranks[0].get(), number); }, as_after) == TOPKNOT_OK);
      REQUIRE((state_of(ranks[0].get()) == before));
      const auto as_before = [&] { REQUIRE((state_of(ranks[0].get()) == before)); };
      CHECK(until_it_succeeds([&] { return topknot_load(ranks[0].get(), after.data(), after.size()); },
                              as_before) == TOPKNOT_OK);
      as_after();
    }
  }
}

TEST_CASE("residuals and states with a number that is not finite are refused, of every method") {
  for (const Case& what : cases()) {
    INFO(what.method << ", " << what.keys.back());
    if (what.rows > 24) continue;
    Ranks ranks(what, false);
    ranks.step(0, false);
    const State states[] = {state_of(ranks[0].get()), state_of(ranks[1].get())};
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = 0; i + sizeof nan <= std::min(states[0].size(), states[1].size()); i += 101) {
      int loaded = 0;  // both ranks' at the same place: a state says what a rank sends next
      for (const std::size_t rank : {0, 1}) {
        State bad = states[rank];
        std::memcpy(bad.data() + i, &nan, sizeof nan);
        loaded += topknot_load(ranks[rank].get(), bad.data(), bad.size()) == TOPKNOT_OK;
      }
      if (loaded == 2) ranks.step(1, false);
      for (const std::size_t rank : {0, 1})
        REQUIRE(topknot_load(ranks[rank].get(), states[rank].data(), states[rank].size()) == TOPKNOT_OK);
    }
    std::vector<float> residual(480);
    residual[7] = std::numeric_limits<float>::infinity();
    CHECK(topknot_set_residual(ranks[0].get(), 0, residual.data()) == TOPKNOT_INVALID);
    CHECK((state_of(ranks[0].get()) == states[0]));
  }
}

TEST_CASE(
    "an error is one line without control characters or places in the sources, whatever the names are") {
  const std::string name = "a\n\x1b[2J\xff";
  const std::int64_t shape[] = {8, 4};
  const topknot_tensor tensors[] = {{name.c_str(), shape, 2}, {name.c_str(), shape, 2}};
  topknot_compressor* made = nullptr;
  const auto create = [&](const char* method, const char* key, std::size_t count) {
    return topknot_create(method, &key, 1, tensors, count, 0, 1, &made);
  };
  const auto says = [](const std::string& part) {
    const std::string text = topknot_error();
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
    CHECK(std::none_of(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }));
    CHECK(text.find(".cpp") == std::string::npos);
  };
  REQUIRE(create("topk", "density=1", 2) == TOPKNOT_INVALID);
  says("'a\\n\\x1b[2J\\xff'");
  for (const char* key : {"x\ny=1", "density=\x1b", "device=\x1b", "select=\x1b\n", "scope=\n", "\x1b"}) {
    REQUIRE(create("topk", key, 1) == TOPKNOT_INVALID);
    says("\\");
  }
  REQUIRE(create("top\nk", "density=1", 1) == TOPKNOT_INVALID);
  says("'top\\nk'");
  REQUIRE(create("topk", "min_numel=9999999999", 1) == TOPKNOT_INVALID);
  says("0 to 2,147,483,647, not 9999999999");

  REQUIRE(create("topk", "undo=true", 1) == TOPKNOT_OK);
  const Handle compressor(made);
  alignas(4) char memory[129] = {};
  const std::int32_t which = 0;
  const auto encode = [&](std::int64_t number, std::size_t offset, topknot_type type, topknot_round** round) {
    const topknot_step step{number, 0.5, 1};
    const void* from = memory + offset;
    return topknot_encode(compressor.get(), &step, &which, 1, &from, type, 1, round);
  };
  topknot_round* round = nullptr;
  CHECK(encode(-1, 0, TOPKNOT_FLOAT32, &round) == TOPKNOT_INVALID);
  CHECK(topknot_undo(compressor.get(), -1) == TOPKNOT_INVALID);
  says("no step -1");
  CHECK(encode(0, 1, TOPKNOT_FLOAT16, &round) == TOPKNOT_INVALID);
  CHECK(encode(0, 1, TOPKNOT_BFLOAT16, &round) == TOPKNOT_INVALID);
  CHECK(encode(0, 2, TOPKNOT_FLOAT32, &round) == TOPKNOT_INVALID);
  says("'a\\n");
  REQUIRE(encode(0, 2, TOPKNOT_FLOAT16, &round) == TOPKNOT_OK);
  REQUIRE(decode_alone(round) == TOPKNOT_DONE);
  void* to = memory + 1;
  CHECK(topknot_commit(round, &to, TOPKNOT_BFLOAT16, 1) == TOPKNOT_INVALID);
  says("address");

  const float gradient[32] = {1};  // of another vector: its block in the place of the round's own
  REQUIRE(encode(0, 0, TOPKNOT_FLOAT32, &round) == TOPKNOT_OK);
  const topknot_message message = message_of(round);
  const Bytes other = HostMemory::read(message.block, message.block_bytes);
  topknot_discard(round);
  round = encoded(compressor, {0, 0.25, 1}, {0}, {gradient});
  const void* blocks[] = {other.data()};
  const std::size_t sizes[] = {other.size()};
  CHECK(topknot_decode(round, blocks, sizes) == TOPKNOT_INVALID);
  says("own block came back changed");
  topknot_discard(round);
}

}  // namespace
}  // namespace topknot
