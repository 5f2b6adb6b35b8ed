// libtopknot, by its C interface alone, beside the compressors of this program.
#include <thread>

#include "tests/library/library_fixture.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE(
    "every method of the library has the bits of train's compressors, in any buckets, also after a load") {
  for (const std::size_t ranks : {2u, 4u})
    for (const std::string& method : methods()) {
      INFO(method << ", " << ranks << " ranks");
      std::vector<SimulatedRanks> reference;
      std::size_t arena = 0;
      for (const NamedShape& shape : kShapes) {
        GroupSpec spec = whole_group(shape.numel(), static_cast<int>(ranks));
        const std::size_t rows =
            shape.lengths.size() > 1 ? static_cast<std::size_t>(shape.lengths[0]) : shape.numel();
        spec.tensors = {{0, rows, shape.numel() / rows}};
        spec.offset = arena;
        arena += shape.numel();
        const bool compressed = shape.lengths.size() > 1 || method == "dense";
        reference.emplace_back(compressed ? options_for(method) : named("dense"), spec);
      }
      std::vector<Handle> handles = make_ranks(method, keys_for(method), static_cast<int>(ranks));
      for (std::int64_t step = 0; step < 20; ++step) {
        const std::vector<Vectors> gradients = all_gradients(step, ranks);
        const std::vector<std::vector<std::vector<std::int32_t>>> buckets = {
            {kAll}, {{3, 2}, {1, 0}}, {{1}, {0, 2, 3}}};
        std::vector<Vectors> averages(ranks, Vectors(kShapes.size()));
        for (const std::vector<std::int32_t>& bucket : buckets[static_cast<std::size_t>(step) % 3]) {
          const Outcome outcome = exchange(handles, bucket, step, 0.03, gradients);
          REQUIRE(outcome.state == TOPKNOT_DONE);
          for (std::size_t r = 0; r < ranks; ++r)
            for (const std::int32_t t : bucket)
              averages[r][t] = outcome.average(r, static_cast<std::size_t>(t));
        }
        for (std::size_t t = 0; t < kShapes.size(); ++t) {
          INFO("step " << step << ", " << kShapes[t].name);
          for (std::size_t r = 0; r < ranks; ++r) reference[t][r].gradient = gradients[r][t];
          REQUIRE(reference[t].step(step, 0.03, {}, true, 0.1));
          for (std::size_t r = 0; r < ranks; ++r) {
            REQUIRE(same_bits<float>(std::span<const float>(reference[t][r].average), averages[r][t]));
            std::vector<float> residual(averages[r][t].size());
            int has = 0;
            REQUIRE(topknot_residual(handles[r].get(), static_cast<std::int32_t>(t), residual.data(), &has) ==
                    TOPKNOT_OK);
            if (has) REQUIRE(same_bits(residual, reference[t][r].residual));
          }
        }
        if (step != 9) continue;
        std::vector<std::vector<char>> states;
        for (const Handle& handle : handles) states.push_back(state_of(handle.get()));
        handles = make_ranks(method, keys_for(method), static_cast<int>(ranks));
        for (std::size_t r = 0; r < ranks; ++r)
          REQUIRE(topknot_load(handles[r].get(), states[r].data(), states[r].size()) == TOPKNOT_OK);
      }
    }
}

TEST_CASE("with scope=model the tensors that are compressed are one vector, and the others are averaged") {
  const auto together = [](const auto& parts, const std::vector<std::int32_t>& inside) {
    std::decay_t<decltype(parts[0])> all;
    for (const std::int32_t t : inside) all.insert(all.end(), parts[t].begin(), parts[t].end());
    return all;
  };
  for (const auto& [key, inside] :
       {std::pair("dense_1d=false", kAll), std::pair("min_numel=1000", std::vector<std::int32_t>{2, 3})}) {
    INFO(key);
    const std::vector<Handle> handles = make_ranks("topk", {"scope=model", "density=0.01", key}, 2);
    GroupSpec spec = whole_group(0, 2);
    for (const std::int32_t t : inside) spec.numel += kShapes[t].numel();
    spec.segments = {{0, spec.numel}};
    SimulatedRanks reference(named("topk"), spec);
    for (std::int64_t step = 0; step < 3; ++step) {
      const std::vector<Vectors> gradients = all_gradients(step, 2);
      for (std::size_t r = 0; r < 2; ++r) reference[r].gradient = together(gradients[r], inside);
      REQUIRE(reference.step(step, 0.01));
      const Outcome outcome = exchange(handles, kAll, step, 0, gradients);
      CHECK((bytes_of(reference[1].average) == together(outcome.averages[1], inside)));
      for (std::int32_t t = 0; t < inside[0]; ++t)  // few elements; one dimension
        for (std::size_t i = 0; i < gradients[0][t].size(); ++i)
          REQUIRE(outcome.average(0, t)[i] == (gradients[0][t][i] + gradients[1][t][i]) * 0.5f);
    }
  }
}

TEST_CASE("a NaN is found by all ranks, and a discarded step or an undone one leaves no trace") {
  for (const std::string& method : methods()) {
    INFO(method);
    std::vector<std::string> keys = keys_for(method);
    keys.push_back("undo=true");
    const std::vector<Handle> handles = make_ranks(method, keys, 2),
                              undisturbed = make_ranks(method, keys, 2);
    for (std::int64_t step = 0; step < 4; ++step) {
      std::vector<Vectors> bad = all_gradients(50 + step, 2);
      exchange(handles, kAll, step, 0.03, bad, false);
      exchange(handles, {2, 3}, step, 0.03, bad);
      exchange(handles, {1, 0}, step, 0.03, bad);
      const Vectors sound = bad[1];
      bad[1][2][77] = std::nanf("");
      REQUIRE(exchange(handles, kAll, step + 1, 0.03, bad).state == TOPKNOT_NOT_FINITE);  // between the two
      for (const Handle& handle : handles) REQUIRE(topknot_undo(handle.get(), step) == TOPKNOT_OK);
      const std::vector<Vectors> gradients = all_gradients(step, 2);
      const Outcome a = exchange(handles, kAll, step, 0.03, gradients),
                    b = exchange(undisturbed, kAll, step, 0.03, gradients);
      for (std::size_t t = 0; t < kShapes.size(); ++t) REQUIRE((a.averages[1][t] == b.averages[1][t]));
      CHECK(state_of(handles[0].get()) == state_of(undisturbed[0].get()));
    }
  }
}

TEST_CASE("halves are read and written to nearest, ties to even, and come back as they were") {
  const std::vector<NamedShape> shapes = {{"w", {65536, 1}}};
  const Handle handle = make("dense", {}, 0, 1, shapes);
  const auto through = [&](const void* from, topknot_type in, void* to, topknot_type out, double scale = 1,
                           double back = 1) {
    topknot_round* const round = encoded(handle, {0, 1, 1}, {0}, {from}, in, scale);
    const topknot_result state = topknot_decode(round, nullptr, nullptr);
    if (state == TOPKNOT_DONE) return topknot_commit(round, &to, out, back);
    topknot_discard(round);
    return state;
  };
  for (const topknot_type type : {TOPKNOT_FLOAT16, TOPKNOT_BFLOAT16}) {
    const unsigned infinity = type == TOPKNOT_FLOAT16 ? 0x7C00 : 0x7F80;
    std::vector<std::uint16_t> halves(65536), back(65536);
    for (unsigned i = 0; i < 65536; ++i)
      halves[i] = static_cast<std::uint16_t>((i & 0x7FFF) < infinity && i != 0x8000 ? i : 1);
    REQUIRE(through(halves.data(), type, back.data(), type) == TOPKNOT_OK);
    CHECK(back == halves);
    std::vector<float> floats(65536);
    REQUIRE(through(halves.data(), type, floats.data(), TOPKNOT_FLOAT32, 0.5, 4) == TOPKNOT_OK);
    CHECK(floats[0x3C00] == (type == TOPKNOT_FLOAT16 ? 2.0f : std::bit_cast<float>(0x3C000000u) * 2));
    halves[7] = static_cast<std::uint16_t>(infinity);
    CHECK(through(halves.data(), type, back.data(), type) == TOPKNOT_NOT_FINITE);
  }
  std::vector<float> values(65536);
  const std::vector<std::pair<float, unsigned>> known = {{1.0f, 0x3C00},         {65504, 0x7BFF},
                                                         {65519.99f, 0x7BFF},    {65520, 0x7C00},
                                                         {1 + 0x1p-11f, 0x3C00}, {1 + 3 * 0x1p-11f, 0x3C02},
                                                         {0x1p-24f, 1},          {0x1p-25f, 0},
                                                         {0x1.8p-24f, 2},        {0x1.7p-25f, 1},
                                                         {0x1p-14f, 0x400},      {0x1.ffbp-15f, 0x3FF},
                                                         {0x1.ffep-15f, 0x400},  {-2.5f, 0xC100},
                                                         {0x1.004p0f, 0x3C01},   {1e-30f, 0}};
  for (std::size_t i = 0; i < known.size(); ++i) values[i] = known[i].first;
  std::vector<std::uint16_t> halves(65536);
  REQUIRE(through(values.data(), TOPKNOT_FLOAT32, halves.data(), TOPKNOT_FLOAT16) == TOPKNOT_OK);
  for (std::size_t i = 0; i < known.size(); ++i) {
    INFO(known[i].first);
    CHECK(halves[i] == known[i].second);
  }
}

TEST_CASE("mistakes of the caller are refused with what to do, and change nothing") {
  CHECK(says(refusal("topkk", {}), {"topkk", "did you mean 'topk'"}));
  CHECK(says(refusal("topk", {"desity=0.1"}), {"desity", "did you mean 'density'"}));
  CHECK(says(refusal("topk", {"density"}), {"density", "name=value"}));
  CHECK(says(refusal("topk", {"density=0"}), {"density", "above 0"}));
  CHECK(says(refusal("topk", {"density=0.1x"}), {"density", "a number"}));
  CHECK(says(refusal("topk", {"density=0.1", "density=0.1"}), {"density", "twice"}));
  CHECK(says(refusal("topk", {"dense_1d=maybe"}), {"dense_1d", "true or false"}));
  CHECK(says(refusal("topk", {"codec=rise"}), {"rise", "rice"}));
  CHECK(says(refusal("powersgd", {"codec=rice"}), {"codec", "powersgd"}));
  CHECK(says(refusal("topk", {"momentum=0.9"}), {"'momentum'", "optimizer"}));
  CHECK(says(refusal("powersgd", {"nesterov=true"}), {"'nesterov'", "optimizer"}));
  CHECK(says(refusal("topk", {}, {{"a", {1 << 20, 1 << 20}}}), {"'a'", "2^31 - 1"}));
  CHECK(says(refusal("topk", {}, {{"a", {std::int64_t{1} << 31}}}), {"'a'", "2^31 - 1"}));
  CHECK(says(refusal("topk", {}, {{"a", {2, 2}}, {"a", {2}}}), {"two tensors", "'a'"}));
  CHECK(says(refusal("topk", {}, {{"a", {2, 0}}}), {"'a'", "no elements"}));
  CHECK(says(refusal("topk", {}, {}), {"no tensor"}));
  CHECK(says(refusal("topk", {"device=gpu0"}), {"'device'", "cuda:N", "gpu0"}));

  const std::vector<Handle> one = make_ranks("topk", {"density=0.01"}, 1);
  const Vectors gradients = gradients_of(0, 0);
  const std::vector<const void*> from = {gradients[2].data(), gradients[2].data()};
  const topknot_step step{0, 0, 1}, dense{0, 2, 1};
  topknot_round *round = nullptr, *other = nullptr;
  const auto encode = [&](const std::vector<std::int32_t>& which, const topknot_step& when,
                          topknot_round** made) {
    return topknot_encode(one[0].get(), &when, which.data(), which.size(), from.data(), TOPKNOT_FLOAT32, 1,
                          made);
  };
  const auto refused = [&](topknot_result result, const std::string& part) {
    return result == TOPKNOT_INVALID && says(topknot_error(), {part});
  };
  CHECK(refused(encode({4}, step, &round), "no tensor 4"));
  CHECK(refused(encode({-1}, step, &round), "no tensor -1"));
  CHECK(refused(encode({2, 2}, step, &round), "up.weight"));
  CHECK(refused(encode({2}, dense, &round), "density"));
  CHECK(refused(encode({}, step, &round), "no tensor"));
  REQUIRE(encode({2}, step, &round) == TOPKNOT_OK);
  CHECK(refused(encode({2}, step, &other), "up.weight"));
  std::size_t bytes = 0;
  CHECK(refused(topknot_save(one[0].get(), nullptr, 0, &bytes), "under way"));
  CHECK(refused(topknot_decode(round, nullptr, nullptr), "every rank's"));
  topknot_message message = message_of(round);
  CHECK(refused(topknot_commit(round, nullptr, TOPKNOT_FLOAT32, 1), "discarded"));  // not decoded
  CHECK(refused(topknot_undo(one[0].get(), 0), "undo=true"));
  CHECK(refused(topknot_encode(nullptr, &step, nullptr, 0, nullptr, TOPKNOT_FLOAT32, 1, &round), "null"));
  CHECK(refused(topknot_message_of(nullptr, &message), "null"));
  topknot_discard(nullptr);
  topknot_destroy(nullptr);
  std::vector<float> residual(gradients[1].size());
  CHECK(refused(topknot_set_residual(one[0].get(), 1, residual.data()), "norm.bias"));
  int has = -1;
  REQUIRE(topknot_residual(one[0].get(), 1, residual.data(), &has) == TOPKNOT_OK);
  CHECK(has == 0);
  residual.resize(gradients[2].size());
  REQUIRE(topknot_residual(one[0].get(), 2, residual.data(), &has) == TOPKNOT_OK);
  CHECK(has == 1);
  CHECK(exchange(one, kAll, 0, 0.01, {gradients}).state == TOPKNOT_DONE);
  const std::vector<char> state = state_of(one[0].get());
  const Handle none = make("topk", {"density=0.01", "memory=none"}, 0, 1),
               other_density = make("topk", {"density=0.02", "codec=rice"}, 0, 1);
  CHECK(refused(topknot_load(none.get(), state.data(), state.size()), "memory=none"));
  CHECK(topknot_load(other_density.get(), state.data(), state.size()) == TOPKNOT_OK);
  CHECK(refused(topknot_encode(one[0].get(), &step, kAll.data(), 1, from.data(), 3, 1, &round),
                "topknot_type"));
}

TEST_CASE(
    "damaged messages and states are refused, whatever their bytes, and the next step is as if they had not "
    "come") {
  const CounterRng rng(3, RngUse::test);
  std::uint64_t draw = 0;
  for (const std::string& method : methods()) {
    INFO(method);
    const std::vector<Handle> handles = make_ranks(method, keys_for(method), 2),
                              undisturbed = make_ranks(method, keys_for(method), 2);
    const std::vector<Vectors> gradients = all_gradients(1, 2);
    std::vector<const void*> from;
    for (const auto& gradient : gradients[0]) from.push_back(gradient.data());
    int accepted = 0;
    for (int attempt = 0; attempt < 200; ++attempt) {
      topknot_round* const round = encoded(handles[0], {0, 0.03, 0.1}, kAll, from);
      const topknot_message message = message_of(round);
      if (message.sum) {
        topknot_discard(round);
        break;
      }
      const auto* begin = static_cast<const char*>(message.block);
      std::vector<char> own(begin, begin + message.block_bytes), bad = own;
      const bool longer = attempt % 10 == 9;  // sound, with a byte behind it
      if (attempt % 3 == 0) bad.resize(rng.below(draw++, static_cast<std::uint32_t>(own.size())));
      for (int flips = 0; flips < 1 + attempt % 5 && !bad.empty(); ++flips) {
        char& byte = bad[rng.below(draw++, static_cast<std::uint32_t>(bad.size()))];
        byte = static_cast<char>(byte ^ static_cast<char>(1 + rng.below(draw++, 255)));
      }
      if (longer) {
        bad = own;
        bad.push_back(0);
      }
      const void* blocks[] = {own.data(), bad.data()};
      const std::size_t sizes[] = {own.size(), bad.size()};
      const bool sound = topknot_decode(round, blocks, sizes) != TOPKNOT_INVALID;
      CHECK_FALSE((sound && longer));
      accepted += sound;
      topknot_discard(round);
    }
    CHECK(accepted < 200);
    const std::vector<char> state = state_of(handles[0].get());
    const auto load = [&](const std::vector<char>& from) {
      return topknot_load(handles[0].get(), from.data(), from.size());
    };
    for (int attempt = 0; attempt < 200; ++attempt) {
      std::vector<char> bad = state;
      bad.resize(rng.below(draw++, static_cast<std::uint32_t>(state.size())));
      CHECK(load(bad) == TOPKNOT_INVALID);
      bad = state;
      for (int flips = 0; flips < 1 + attempt % 5; ++flips) {
        char& byte = bad[rng.below(draw++, static_cast<std::uint32_t>(bad.size()))];
        byte = static_cast<char>(byte ^ static_cast<char>(1 + rng.below(draw++, 255)));
      }
      if (load(bad) == TOPKNOT_INVALID) {
        CHECK(state_of(handles[0].get()) == state);
      } else {  // nonsense, or another state: it ends no process
        topknot_round* const round = encoded(handles[0], {2, 0.03, 0.1}, kAll, from);
        const topknot_message message = message_of(round);
        const void* blocks[] = {message.block, message.block};
        const std::size_t sizes[] = {message.block_bytes, message.block_bytes};
        topknot_decode(round, blocks, sizes);
        topknot_discard(round);
        CHECK(load(state) == TOPKNOT_OK);
      }
    }
    const Outcome a = exchange(handles, kAll, 0, 0.03, gradients),
                  b = exchange(undisturbed, kAll, 0, 0.03, gradients);
    for (std::size_t t = 0; t < kShapes.size(); ++t) CHECK((a.averages[0][t] == b.averages[0][t]));
    for (const std::string& other : {std::string("topk"), std::string("randk")}) {
      if (other == method) continue;
      const Handle different = make(other, {}, 0, 2);
      CHECK(topknot_load(different.get(), state.data(), state.size()) == TOPKNOT_INVALID);
    }
    const Handle more_ranks = make(method, keys_for(method), 0, 3);
    CHECK(topknot_load(more_ranks.get(), state.data(), state.size()) == TOPKNOT_INVALID);
  }
}

TEST_CASE("rounds of different tensors may be under way at once, in threads of their own") {
  for (int attempt = 0; attempt < 20; ++attempt) {
    const std::vector<Handle> handles = make_ranks("topk", {"density=0.05"}, 1),
                              alone = make_ranks("topk", {"density=0.05"}, 1);
    const Vectors gradients = gradients_of(attempt, 0);
    Vectors averages(kShapes.size());
    errors_of_threads(4, [&](int i) {
      averages[i].resize(gradients[i].size());
      const std::int32_t t = i;
      const void* from = gradients[i].data();
      void* to = averages[i].data();
      const topknot_step step{0, 0, 1};
      topknot_round* round = nullptr;
      topknot_message message;
      const std::string wrong = "no" + kShapes[i].name;  // each thread has its own error
      if (!contains(refusal(wrong, {}), wrong)) return;
      if (topknot_encode(handles[0].get(), &step, &t, 1, &from, TOPKNOT_FLOAT32, 1, &round) != TOPKNOT_OK)
        return;
      topknot_message_of(round, &message);
      topknot_decode(round, &message.block, &message.block_bytes);
      topknot_commit(round, &to, TOPKNOT_FLOAT32, 1);
    });
    const Outcome expected = exchange(alone, kAll, 0, 0, {gradients});
    for (std::size_t t = 0; t < 4; ++t) CHECK(same_bits(averages[t], expected.average(0, t)));
  }
}

TEST_CASE("weights of the ranks are those of their contributions to the average") {
  const std::vector<NamedShape> shapes = {{"m", {2, 2}}};
  const std::vector<std::vector<float>> gradients = {{4, 0, 1, 0}, {8, 0, 0, 1}};
  for (const std::string method : {"topk", "dense"}) {
    const std::vector<Handle> ranks = make_ranks(method, {"density=0.25"}, 2, shapes);
    const double weights[] = {1, 3}, wrong[] = {1, 0};
    for (const Handle& rank : ranks) REQUIRE(topknot_set_weights(rank.get(), weights) == TOPKNOT_OK);
    CHECK(topknot_set_weights(ranks[0].get(), wrong) == TOPKNOT_INVALID);  // and changes nothing
    const auto average = [&] {
      return exchange(ranks, {0}, 0, 0, {{gradients[0]}, {gradients[1]}}).average(1, 0);
    };
    CHECK(average()[0] == (0.5f * 4 + 1.5f * 8) / 2);
    for (const Handle& rank : ranks) REQUIRE(topknot_set_weights(rank.get(), nullptr) == TOPKNOT_OK);
    CHECK(average()[0] == 6);
  }
}

TEST_CASE("a round tells what its rank sends, and the contribution when it is decoded") {
  const std::vector<NamedShape> shapes = {{"a", {10, 10}}, {"b", {4, 5}}};
  std::vector<float> a(100), b(20);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i) * (i % 2 ? 1.0f : -1.0f);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = 1;
  const auto sent_of = [&](const std::string& method, const std::vector<std::string>& keys, std::size_t i,
                           bool decoded) {
    static Handle owner;  // of the lists
    owner = make(method, keys, 0, 1, shapes);
    topknot_round* const round = encoded(owner, {0, 0, 1}, {1, 0}, {b.data(), a.data()});
    if (decoded) REQUIRE(decode_alone(round) == TOPKNOT_DONE);
    topknot_sent sent;
    REQUIRE(topknot_sent_of(round, i, &sent) == TOPKNOT_OK);
    CHECK(topknot_sent_of(round, 2, &sent) == TOPKNOT_INVALID);
    return sent;
  };
  topknot_sent sent = sent_of("topk", {"density=0.05"}, 1, false);
  CHECK(sent.target == 5);
  CHECK(sent.count == 5);
  CHECK(sent.threshold == 95);
  CHECK(sent.values == nullptr);
  sent = sent_of("topk", {"density=0.05"}, 1, true);
  REQUIRE(sent.entries == 5);
  for (std::uint32_t i = 0; i < 5; ++i) CHECK((sent.indices[i] == 95 + i && sent.values[i] == a[95 + i]));
  CHECK(sent_of("topk", {"density=0.05"}, 0, true).count == 1);
  sent = sent_of("threshold", {"threshold=49.5", "density=0.05", "capacity=2"}, 1, true);
  CHECK(sent.count == 10);
  CHECK(sent.over_capacity == 40);
  CHECK(sent.threshold == 49.5);
  sent = sent_of("threshold", {"threshold=5000"}, 1, true);  // none, which is known
  CHECK((sent.entries == 0 && sent.indices && sent.values));
  sent = sent_of("signsgd", {}, 1, true);
  CHECK((sent.target == 0 && sent.entries == 100 && !sent.indices && sent.values));
  CHECK(sent_of("dense", {}, 1, true).values == nullptr);
}

TEST_CASE("a method's name fills the keys of the library that its paper says something of") {
  const std::vector<NamedShape> shapes = {{"m", {64, 64}}, {"bias", {4096}}};
  const std::vector<float> values = [] {
    std::vector<float> made(4096);
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<float>(i % 911) - 400;
    return made;
  }();
  const auto sent = [&](const std::string& method, const std::vector<std::string>& keys, std::int32_t which) {
    const Handle owner = make(method, keys, 0, 1, shapes);
    topknot_sent sent;
    REQUIRE(topknot_sent_of(encoded(owner, {}, {which}, {values.data()}), 0, &sent) == TOPKNOT_OK);
    return sent.target;
  };
  CHECK(sent("sparseloco", {}, 0) == 64);
  CHECK(sent("sparseloco", {}, 1) == 64);
  CHECK(sent("sparseloco", {"density=0.001"}, 0) == 4);
  CHECK(sent("sparseloco", {"dense_1d=true"}, 1) == 0);
  CHECK(sent("demo", {}, 0) == 32);
  CHECK(sent("topk", {}, 0) == 4);
  CHECK(refusal("sparseloco", {"density=2"}).find("density") != std::string::npos);
}

TEST_CASE("the library lists every method, and its version") {
  const std::string json = topknot_methods();
  for (const std::string& method : compressors().names()) {
    INFO(method);
    CHECK(json.find("\"" + method + "\":{\"help\":") != std::string::npos);
  }
  CHECK(json.find("\"name\":\"feedback_decay\"") != std::string::npos);
  CHECK(json.find("\"settings\":{\"compress.density\":\"0.015625\"") != std::string::npos);
  CHECK(json.find("\"method\":\"dense\",\"settings\":{\"exchange.outer.name\":\"nesterov\"") !=
        std::string::npos);
  CHECK(topknot_interface() == TOPKNOT_INTERFACE);
  CHECK(std::string(topknot_version()).find('.') != std::string::npos);
}
