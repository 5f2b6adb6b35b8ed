// First weights from a file, and parameters that are not trained.

#include "tests/train/made_up_text.h"
#include "tests/train/model_copy.h"
#include "tests/train/small_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/model_file.h"
#include "train/step.h"

namespace topknot::testing {
namespace {

using Values = std::map<std::string, std::vector<float>>;  // by parameter

Values values_of(const ParameterArena& arena) {
  Values values;
  for (const auto& part : {arena.parameters(), arena.frozen()})
    for (const Parameter* p : part) values[p->name()] = {p->value(), p->value() + p->numel()};
  return values;
}

const Keys kSmallResnet = {"model.name=resnet20", "data.image_size=8", "data.train_size=32",
                           "optimizer.weight_decay=0.1", "optimizer.lr=0.1"};

// Rank 0's parameters after so many steps of two ranks.
Values after_steps(int steps, const Keys& overrides) {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, with(kSmallResnet, {"dist.ranks=2"}, overrides));
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  Values values;
  run_ranks("threads", 2, [&](Communicator& communicator) {
    Step step(inputs, communicator);
    step.begin_run(steps);
    step.start_epoch(0, 0);
    for (int i = 0; i < steps; ++i) {
      step.make({.step = i, .density = 0.1, .lr = loaded.config.optimizer.lr});
      CHECK(step.reports(1)[0].committed());
    }
    step.check_parameters("at the end");
    step.finish();
    if (communicator.rank() == 0) values = values_of(step.arena());
  });
  return values;
}

std::unique_ptr<BuiltModel> model_of(const Keys& overrides) {
  return Prepared(with(kSmallResnet, overrides)).model;
}

void write_model(BuiltModel& model, const std::string& path) {
  const ModelCopy copy = copy_model(model.store);
  std::ofstream(path, std::ios::binary) << safetensors_text(model_tensors(model.store, copy));
}

}  // namespace

TEST_CASE("frozen parameters keep their values, and all others move, whatever the method") {
  const Values before = values_of(model_of({})->store.arena());
  for (const char* method : {"dense", "topk", "dgc", "signsgd", "powersgd", "randk"}) {
    const Values after = after_steps(
        3, {std::string("compress.name=") + method, "model.freeze=[stem,stage[12].*,*.beta,fc.bias]"});
    std::size_t moved = 0, kept = 0;
    for (const auto& [name, values] : after) {
      const bool frozen = matches_any({"stem", "stage[12]", "*.beta", "fc.bias"}, name);
      INFO(method << ", " << name);
      if (frozen) CHECK(values == before.at(name));
      ++(frozen ? kept : moved);
    }
    CHECK(moved > 10);
    CHECK(kept > 10);
    CHECK(after.at("fc.weight") != before.at("fc.weight"));
    CHECK(after.at("stage3.block1.1.bn.gamma") != before.at("stage3.block1.1.bn.gamma"));
  }
}

TEST_CASE("a frozen parameter changes no other one's gradient") {
  const Values whole = after_steps(1, {"compress.name=dense"});
  for (const char* pattern : {"stem", "*.conv", "*.gamma", "*.beta", "*.bn", "stage2", "fc"}) {
    const Values some = after_steps(1, {"compress.name=dense", std::string("model.freeze=") + pattern});
    for (const auto& [name, values] : some)
      if (!matches_any({pattern}, name)) {
        INFO(pattern << ", " << name);
        CHECK(values == whole.at(name));
      }
  }
}

TEST_CASE("frozen parameters are not exchanged, and gradient-sized memory is without them") {
  const auto whole = model_of({}), head = model_of({"model.freeze=[stem,stage*]"});
  CHECK(head->store.arena().size() == 64 * 10 + 10);
  CHECK(head->store.arena().frozen().size() + 2 == whole->store.arena().parameters().size());
  CHECK(head->store.arena().host_weights().size() == whole->store.arena().size());
  const Run run =
      train("threads", 2, with(kSmallResnet, {"model.freeze=[stem,stage*]", "train.max_steps=2"}));
  CHECK(run.metrics.end->bytes_dense == 2 * 4 * 650);
}

TEST_CASE("a pattern after ! takes names back; one that matches nothing or everything is refused") {
  CHECK(model_of({"model.freeze=[*,!fc]"})->store.arena().size() == 64 * 10 + 10);
  const std::vector<std::string> patterns = {"stage*", "!stage2", "stage2.block1"};
  CHECK(matches_any(patterns, "stage2.block1.1.conv.weight"));
  CHECK_FALSE(matches_any(patterns, "stage2.block2.1.conv.weight"));
  CHECK_FALSE(matches_any({"!fc"}, "stem.conv.weight"));
  const auto refused = [](const std::string& freeze, std::initializer_list<std::string> parts) {
    return user_error([&] { model_of({"model.freeze=" + freeze}); }, parts);
  };
  CHECK(refused("[*,!head]", {"'!head' matches nothing"}));
  CHECK(refused("[fc,fx.*]",
                {"model.freeze", "'fx.*' matches nothing", "stem.conv.weight, ", ", fc.weight, fc.bias"}));
  CHECK(refused("[\"stem.bn.running_mean\"]", {"model.freeze"}));
  CHECK(refused("*", {"model.freeze", "every parameter is frozen"}));
}

TEST_CASE("a model begins with the weights and statistics of model.init_from, frozen or not") {
  const TempFolder temp;
  const auto from = model_of({"seed=7"});
  for (const auto& buffer : from->store.buffers()) buffer->values[0] = 0.5f;
  write_model(*from, temp.at("from.safetensors"));
  const std::string file = "model.init_from=" + temp.at("from.safetensors");
  const auto to = model_of({file, "model.freeze=[stage1,fc]"});
  CHECK(values_of(to->store.arena()) == values_of(from->store.arena()));
  for (std::size_t i = 0; i < to->store.buffers().size(); ++i)
    CHECK(to->store.buffers()[i]->values == from->store.buffers()[i]->values);

  // A new last layer for other classes, drawn by the run's own seed.
  const auto tuned = model_of({file, "data.classes=4", "model.reinit=fc"});
  const auto drawn = model_of({"data.classes=4"});
  Values expected = values_of(from->store.arena());
  for (const char* name : {"fc.weight", "fc.bias"}) expected[name] = values_of(drawn->store.arena()).at(name);
  CHECK(values_of(tuned->store.arena()) == expected);
  const Keys others{file, "data.classes=4"};
  CHECK_USER_ERROR(model_of(others), temp.at("from.safetensors"),
                   "fc.weight: [10, 64] F32 in the file, [4, 64] F32", "fc.bias");
  CHECK_USER_ERROR(model_of({"model.init_from=" + temp.at("no")}), temp.at("no"), "No such file");
  CHECK_USER_ERROR(model_of({"model.reinit=fc"}), "model.reinit", "model.init_from");
}

TEST_CASE("the architecture of first weights: a key that is not given has their value, another is refused") {
  const TempFolder temp;
  const MadeUpText text;
  const Keys data{"data.name=text", "data.root=" + text.root(), "data.train_size=0", "data.test_size=0",
                  "data.sequence_length=12"};
  run_in_directory(small_run(temp, with(data, {"model.name=gpt", "model.width=32", "model.layers=1",
                                               "model.heads=2", "model.norm_epsilon=1e-3", "model.gelu=exact",
                                               "model.dropout=0", "train.max_steps=1"})));
  const std::string exported = temp.at("m.safetensors");
  const std::string checkpoint = CheckpointStore(temp.at("run/checkpoints")).path(1) + "/model.safetensors";
  export_model(temp.at("run"), exported);
  for (const std::string& path : {exported, checkpoint}) {
    INFO(path);
    const auto load = [&](const Keys& keys) {
      return load_run_config("", with(data, {"model.init_from=" + path}, keys));
    };
    const LoadedConfig loaded = load({});
    CHECK(loaded.problems.empty());
    const Config::Model& model = loaded.config.model;
    CHECK(model.name == "gpt");
    CHECK(model.given<int>("layers") == 1);
    CHECK(model.given<int>("heads") == 2);
    CHECK(model.given<int>("context") == 12);
    CHECK(model.given<double>("norm_epsilon") == 1e-3);
    CHECK(model.given<std::string>("gelu") == "exact");
    CHECK(model.dropout == 0.5);  // is the training's
    CHECK(dump_yaml(loaded.config, false, loaded.origins).find("heads: 2  # model.init_from") !=
          std::string::npos);
    CHECK(unused_keys(loaded).empty());
    CHECK_NOTHROW(build_model(loaded.config, *load_data(loaded.config).train));
    CHECK_NOTHROW(
        throw_problems(load({"model.heads=2", "model.kv_heads=2", "data.sequence_length=8"}).problems));
    for (const char* key : {"model.heads=4", "model.gelu=tanh", "model.norm_epsilon=1e-5"})
      CHECK_USER_ERROR(throw_problems(load({key}).problems),
                       std::string(key).substr(0, std::string(key).find('=')), "(command line)",
                       "leave the key out");
    // Tensors' shapes say so themselves, and of another model's file nothing is taken.
    CHECK(load({"model.width=64"}).problems.empty());
    CHECK(key_value(*find_key("model.heads"), load({"model.name=lstm_lm"}).config) == "4");
  }
}

TEST_CASE("the architecture of first weights with Hugging Face's config.json beside them") {
  const TempFolder temp;
  write_model(*model_of({}), temp.at("m.safetensors"));
  const auto load = [&](const std::string& config, const Keys& keys) {
    std::ofstream(temp.at("config.json")) << config;
    return load_run_config("", with({"model.init_from=" + temp.at("m.safetensors")}, keys));
  };
  const char* llama =
      R"({"model_type":"llama","num_attention_heads":8,"num_key_value_heads":2,"rope_theta":5e5})";
  const LoadedConfig loaded = load(llama, {});
  CHECK(loaded.problems.empty());
  CHECK(loaded.config.model.name == "llama");
  CHECK(loaded.config.model.given<int>("kv_heads") == 2);
  CHECK(loaded.config.model.given<double>("rope_base") == 5e5);
  CHECK_USER_ERROR(throw_problems(load(llama, {"model.rope_base=10000"}).problems), "model.rope_base: 10000",
                   "config.json has 5e5");
  CHECK_USER_ERROR(throw_problems(load(llama, {"model.kv_heads=0"}).problems), "model.kv_heads: 0");
  CHECK_USER_ERROR(throw_problems(load(R"({"model_type":"gpt2","n_head":-3})", {}).problems),
                   "config.json: model.heads", "-3");
  // One of another model, or of another program.
  for (const char* other : {llama, "<html>", "{}"})
    CHECK(load(other, {"model.name=resnet20"}).problems.empty());
  CHECK_USER_ERROR(throw_problems(load("{}", {"model.name=gpt"}).problems), "config.json", "model_type");
}

}  // namespace topknot::testing
