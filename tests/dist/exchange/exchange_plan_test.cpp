#include "dist/plan/merge_plan.h"
#include "tests/dist/exchange/exchange_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

std::vector<std::size_t> ends(const std::vector<Group>& groups) {
  std::vector<std::size_t> result;
  for (const Group& group : groups) result.push_back(group.end);
  return result;
}

}  // namespace

TEST_CASE("a merge plan covers the arena once, in order, on parameter boundaries", "[exchange]") {
  TinyModel model;
  for (const bool compressing : {false, true})
    for (const std::string scope : {"group", "tensor"})
      for (const std::string merge :
           {"none", "all", "size:1", "size:100", "size:160", "size:196", "size:99999"}) {
        const auto groups = cut_groups(*model.arena, compressing, scope, merge);
        std::size_t at = 0;
        std::vector<Parameter*> members;
        for (const Group& group : groups) {
          CHECK(group.begin == at);
          for (Parameter* parameter : group.parameters) {
            CHECK(parameter->offset() == at);
            at += parameter->numel();
            members.push_back(parameter);
            CHECK(group.compressed == (compressing && parameter->compressible()));
          }
          CHECK(group.end == at);
        }
        CHECK(at == model.arena->size());
        const auto order = model.arena->parameters();
        CHECK(members == std::vector<Parameter*>(order.begin(), order.end()));
      }
}

TEST_CASE("merge none, all and size:BYTES make the groups they promise", "[exchange]") {
  TinyModel model;  // conv 12, head 33, unused 6, middle 10 | bias 7
  CHECK(ends(cut_groups(*model.arena, true, "group", "none")) ==
        std::vector<std::size_t>{12, 45, 51, 61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "group", "all")) == std::vector<std::size_t>{61, 68});
  CHECK(ends(cut_groups(*model.arena, false, "group", "all")) == std::vector<std::size_t>{68});
  CHECK(ends(cut_groups(*model.arena, true, "group", "size:88")) == std::vector<std::size_t>{12, 45, 61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "group", "size:196")) == std::vector<std::size_t>{45, 61, 68});
  CHECK(ends(cut_groups(*model.arena, true, "model", "all")) == std::vector<std::size_t>{61, 68});
}

TEST_CASE("auto makes buckets, the first one small, and one group where the scope is the model",
          "[exchange]") {
  constexpr std::size_t mib = std::size_t{1} << 20;
  const std::vector<std::size_t> bytes{mib / 2, mib / 2, 4, 20 * mib, 5 * mib - 4, 4, 30 * mib, 1};
  const Merge buckets = parse_merge(resolve_merge("auto", false, "group"));
  CHECK(buckets.name == "buckets");
  CHECK(buckets.rule->cut(bytes, 0) == std::vector<std::size_t>{2, 3, 1, 1, 1});
  CHECK(resolve_merge("auto", true, "tensor") == "buckets");
  CHECK(resolve_merge("auto", false, "model") == "buckets");  // dense has no scope
  CHECK(resolve_merge("auto", true, "model") == "all");
  CHECK(resolve_merge("size:4096", true, "group") == "size:4096");
  TinyModel model;
  CHECK(ends(cut_groups(*model.arena, true, "model", "auto")) == std::vector<std::size_t>{61, 68});
}

TEST_CASE("scope tensor gives a compressor one range a parameter, the others one in all", "[exchange]") {
  TinyModel model;
  const auto groups = cut_groups(*model.arena, true, "tensor", "all");
  using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;
  CHECK(group_spec(groups[0], "tensor", 2).segments == Ranges{{0, 12}, {12, 45}, {45, 51}, {51, 61}});
  CHECK(group_spec(groups[1], "tensor", 2).segments == Ranges{{0, 7}});
  CHECK(group_spec(groups[0], "group", 2).segments == Ranges{{0, 61}});
  CHECK(group_spec(groups[0], "model", 2).numel == 61);
  CHECK(group_spec(groups[1], "group", 2).offset == 61);  // what random choices are keyed by
}

TEST_CASE("invalid exchange options are errors that name their key", "[exchange]") {
  TinyModel model;
  std::string scope = "group", merge = "all", key = "exchange.merge";
  SECTION("merge") {
    merge = "some";
  }
  SECTION("no size") {
    merge = "size:";
  }
  SECTION("size 0") {
    merge = "size:0";
  }
  SECTION("size with a unit") {
    merge = "size:4MB";
  }
  SECTION("negative size") {
    merge = "size:-4";
  }
  SECTION("scope") {
    scope = "layer", key = "compress.scope";
  }
  SECTION("model and merge") {
    scope = "model", merge = "none", key = "compress.scope";
  }
  try {
    cut_groups(*model.arena, true, scope, merge);
    FAIL("no error");
  } catch (const UserError& error) {
    INFO(error.what());
    CHECK(std::string(error.what()).find(key) != std::string::npos);
  }
}
