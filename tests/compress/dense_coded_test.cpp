// Dense sums in few bits: compress.name dense with a value codec that rounds.
#include "compress/compressor.h"
#include "tests/compress/codec/through.h"
#include "tests/compress/every_method.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

CompressOptions coded(const std::string& values) {
  return named("dense", {"values=" + values});
}

// A rank's message, and the round of two messages that follows.
struct Exchanged {
  std::unique_ptr<Compressor> compressor;
  std::vector<float> gradient, residual;
  Message message;
};
std::vector<Exchanged> encoded(const CompressOptions& options, std::size_t n, int ranks) {
  std::vector<Exchanged> all;
  for (int r = 0; r < ranks; ++r) {
    all.push_back({make_compressor(options, whole_group(n, ranks)),
                   gradient_of(0, std::size_t(r), n),
                   std::vector<float>(n),
                   {}});
    StepContext step;
    step.rank = r;
    all.back().message = all.back().compressor->encode({all.back().gradient, all.back().residual}, step);
  }
  return all;
}
std::vector<std::vector<std::byte>> blocks_of(const std::vector<Exchanged>& all) {
  std::vector<std::vector<std::byte>> blocks;
  for (const Exchanged& one : all) blocks.push_back(one.message.block);
  return blocks;
}

}  // namespace

TEST_CASE("dense in few bits sums what the codec makes of each piece, and codes the sum once more") {
  // The definition, in plain loops: pieces of 336 elements, one chunk each.
  constexpr std::size_t n = 1000, ranks = 3, length = 336;
  const std::vector<float> weights = {0.5f, 1.0f, 1.5f};
  for (const std::string values : {"int8", "fp8", "fp16", "e3m0", "centroid1"}) {
    INFO(values);
    SimulatedRanks made(coded(values), whole_group(n, ranks));
    std::vector<std::vector<float>> residuals(ranks, std::vector<float>(ranks * length));
    for (std::int64_t step = 0; step < 5; ++step) {
      std::vector<std::vector<float>> u(ranks, std::vector<float>(ranks * length));  // zeros behind the last
      for (std::size_t r = 0; r < ranks; ++r) {
        made[r].gradient = gradient_of(step, r, n);
        for (std::size_t i = 0; i < n; ++i) u[r][i] = made[r].gradient[i] + residuals[r][i];
      }
      std::vector<float> average(ranks * length);
      for (std::size_t piece = 0; piece < ranks; ++piece) {
        const auto of = [&](const std::vector<float>& whole) {
          return std::vector<float>(whole.begin() + piece * length, whole.begin() + (piece + 1) * length);
        };
        std::vector<float> sum(length);
        for (std::size_t r = 0; r < ranks; ++r) {
          const std::vector<float> sent = through(values, of(u[r]));
          for (std::size_t i = 0; i < length; ++i) {
            sum[i] += weights[r] * sent[i];
            residuals[r][piece * length + i] = u[r][piece * length + i] - sent[i];
          }
        }
        for (float& x : sum) x *= 1.0f / ranks;
        const std::vector<float> back = through(values, sum);
        for (std::size_t i = 0; i < length; ++i) {
          average[piece * length + i] = back[i];
          residuals[piece][piece * length + i] += ranks / weights[piece] * (sum[i] - back[i]);
        }
      }
      REQUIRE(made.step(step, 1.0, weights));
      average.resize(n);
      for (std::size_t r = 0; r < ranks; ++r) {
        CHECK(same_bits<float>(std::span<const float>(average), made[r].average));
        CHECK(same_bits<float>(std::span(residuals[r]).first(n), made[r].residual));
      }
    }
  }
}

TEST_CASE("dense in few bits forgets nothing: the mean of many steps is the gradients' own") {
  constexpr std::size_t n = 700;
  for (const std::string memory : {"residual", "none"}) {
    SimulatedRanks ranks(with(coded("e3m0"), {"memory=" + memory}), whole_group(n, 4));
    std::vector<double> mean(n), expected(n);
    for (std::int64_t step = 0; step < 200; ++step) {
      for (std::size_t r = 0; r < 4; ++r) ranks[r].gradient = gradient_of(0, r, n);  // the same in every step
      REQUIRE(ranks.step(step, 1.0));
      for (std::size_t i = 0; i < n; ++i) mean[i] += double(ranks[0].average[i]) / 200;
    }
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t r = 0; r < 4; ++r) expected[i] += double(gradient_of(0, r, n)[i]) / 4;
      error += std::pow(mean[i] - expected[i], 2), norm += expected[i] * expected[i];
    }
    CHECK((std::sqrt(error / norm) < 0.02) == (memory == "residual"));
  }
}

TEST_CASE("a message of dense in few bits has a piece for each rank, and whole blocks do as well") {
  const std::size_t n = 50000;  // chunks of 12,512
  auto by_pieces = encoded(coded("int8"), n, 4), by_blocks = encoded(coded("int8"), n, 4);
  const std::size_t piece = 16 + 12512 + 4 * 49;
  for (const Exchanged& one : by_pieces) {
    CHECK(one.message.pieces == 4);
    CHECK(one.message.block.size() == 4 * piece);
    CHECK(one.message.bytes() == 3 * piece);  // a rank sends none to itself
  }
  CHECK(planned_message_bytes(coded("int8"), whole_group(n, 4), 1.0) == 4 * piece);
  // Both ways together 0.26 of dense, for large vectors.
  CHECK(double(planned_message_bytes(coded("fp8"), whole_group(1 << 20, 4), 1.0)) < 0.26 * 4 * (1 << 20));
  const auto whole = blocks_of(by_blocks);
  for (std::size_t r = 0; r < 4; ++r) {
    std::vector<std::vector<std::byte>> cut;
    for (const auto& block : whole)
      cut.emplace_back(block.data() + r * piece, block.data() + (r + 1) * piece);
    by_pieces[r].message = *by_pieces[r].compressor->decode({.blocks = views_of(cut)});
    by_blocks[r].message = *by_blocks[r].compressor->decode({.blocks = views_of(whole)});
    CHECK(by_pieces[r].message.pieces == 0);
    CHECK(by_pieces[r].message.block.size() == piece);
  }
  CHECK(blocks_of(by_pieces) == blocks_of(by_blocks));
}

TEST_CASE("dense in few bits: what is not finite on one rank, and a sum that overflows, all ranks see") {
  for (const float large : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::max()}) {
    SimulatedRanks ranks(coded("int8"), whole_group(100, 2));
    for (std::size_t r = 0; r < 2; ++r) ranks[r].gradient.assign(100, 1.0f);
    ranks[1].gradient[3] = large;
    if (std::isfinite(large)) ranks[0].gradient[3] = large;
    const std::vector<float> residual = ranks[0].residual;
    CHECK_FALSE(ranks.step(0, 1.0));
    CHECK_FALSE(ranks[0].compressor->finite());
    CHECK_FALSE(ranks[1].compressor->finite());
    CHECK(ranks[0].residual == residual);
  }
}

TEST_CASE("damaged pieces of dense in few bits are refused, and the step can be discarded") {
  const std::size_t n = 600;
  const auto refused = [&](int round_of, std::size_t at, std::byte value, const std::string& part) {
    auto ranks = encoded(coded("int8"), n, 2);
    auto blocks = blocks_of(ranks);
    if (round_of == 1) {
      std::vector<Message> seconds;
      for (Exchanged& one : ranks) seconds.push_back(*one.compressor->decode({.blocks = views_of(blocks)}));
      for (std::size_t r = 0; r < 2; ++r) blocks[r] = seconds[r].block;
    }
    if (at < blocks[1].size())
      blocks[1][at] = value;
    else
      blocks[1].push_back(value);
    CHECK(
        says(error_text<Error>([&] { ranks[0].compressor->decode({.blocks = views_of(blocks)}); }), {part}));
    ranks[0].compressor->discard();
    StepContext step;
    CHECK(ranks[0].compressor->encode({ranks[0].gradient, ranks[0].residual}, step).pieces == 2);
  };
  for (const int round : {0, 1}) {
    refused(round, 1 << 20, std::byte{0}, "bytes where there must be");
    refused(round, 0, std::byte{0}, "not a piece");
    refused(round, 5, std::byte{3}, "not a piece");  // flags
    refused(round, 7, std::byte{8}, "compress.values");
    refused(round, 8, std::byte{1}, "another vector");
    refused(round, 16 + 3, std::byte{0xFF}, "an int8 scale");
    refused(round, 16 + 8 + 1, std::byte{0x80}, "int8 values");
  }
}
