// Selection, memory and codes are orthogonal: every combination runs, or is refused by name with the reason.
#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "tests/compress/every_method.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

bool refused(const std::string& select, const std::string& memory) {
  return select == "regtopk" && memory == "ef21";
}

void run(const CompressOptions& options) {
  const std::size_t n = 2500;
  GroupSpec spec;
  spec.numel = n;
  spec.segments = {{0, 2300}, {2300, n}};
  spec.ranks = 2;
  SimulatedRanks ranks(options, spec);
  for (std::int64_t step = 0; step < 4; ++step) {
    for (std::size_t r = 0; r < 2; ++r) ranks[r].gradient = gradient_of(step, r, n);
    REQUIRE(ranks.step(step, 0.03));
    REQUIRE(same_bits<float>(std::span<const float>(ranks[0].average), ranks[1].average));
    for (const float x : ranks[0].average) REQUIRE(std::isfinite(x));
    for (const float x : ranks[0].residual) REQUIRE(std::isfinite(x));
  }
}

}  // namespace

TEST_CASE("every selection goes with every memory, except what is refused with its reason") {
  for (const std::string& select : selectors().names())
    for (const std::string& memory : memories().names()) {
      INFO(select << " with " << memory);
      CompressOptions options = options_for("topk");
      options.select = select;
      options.memory = memory;
      if (!refused(select, memory)) {
        run(options);
        continue;
      }
      try {
        run(options);
        FAIL("not refused");
      } catch (const UserError& error) {
        const std::string text = error.what();
        CHECK(text.find(select) != std::string::npos);
        CHECK(text.find(memory) != std::string::npos);
        CHECK(text.find("makes no sense") != std::string::npos);
      }
    }
}

TEST_CASE("every index codec goes with every value codec, under every memory") {
  for (const std::string& memory : memories().names())
    for (const std::string& code : index_codecs().names())
      for (const std::string& values : value_codecs().names()) {
        INFO(memory << ", " << code << ", " << values);
        CompressOptions options = options_for("topk");
        options.memory = memory;
        options.codec = code;
        options.values = values;
        run(options);
      }
}

TEST_CASE("the error of an inexact value codec stays in the residual") {
  for (const std::string& values : value_codecs().names()) {
    INFO(values);
    CompressOptions options = options_for("topk");
    options.values = values;
    const std::size_t n = 800;
    SimulatedRanks ranks(options, whole_group(n, 1));
    const std::vector<float> g = gradient_of(0, 0, n);
    ranks[0].gradient = g;
    REQUIRE(ranks.step(0, 0.1));
    std::size_t inexact = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (ranks[0].average[i] == 0.0f) continue;
      CHECK(ranks[0].residual[i] == g[i] - ranks[0].average[i]);
      inexact += ranks[0].residual[i] != 0.0f;
    }
    CHECK((inexact > 0) == (values != "fp32"));
  }
}

TEST_CASE("a learning rate inside the accumulator goes with plain memories only, and without momentum") {
  CompressOptions options = options_for("topk");
  options.lr_inside = true;
  options.momentum = 0.9;
  const auto message = [&] {
    try {
      make_compressor(options, whole_group(10, 1));
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CHECK(message().find("optimizer.momentum") != std::string::npos);
  options.momentum = 0;
  CHECK(message() == "accepted");
  options.memory = "ef21";
  CHECK(message().find("compress.memory: ef21") != std::string::npos);
  options.memory = "dgc";
  CHECK(message().find("compress.memory: dgc") != std::string::npos);
}

TEST_CASE("an entry that the collective rejected stays in the residual, and was not sent as to selection") {
  SimulatedRanks ranks(named("regtopk"), whole_group(4, 1));
  ranks[0].gradient = {4, 3, 2, 1};
  ranks[0].rejected = {0};
  REQUIRE(ranks.step(0, 0.25));
  REQUIRE(ranks.sent()[0].indices == std::vector<std::uint32_t>{0});
  CHECK(ranks[0].residual == std::vector<float>{4, 3, 2, 1});
  // Sent and accepted, the entry would count tanh(1/4) of its magnitude now, and the second one would be sent.
  ranks[0].gradient.assign(4, 0);
  REQUIRE(ranks.step(1, 0.25));
  CHECK(ranks.sent()[0].indices == std::vector<std::uint32_t>{0});
}
