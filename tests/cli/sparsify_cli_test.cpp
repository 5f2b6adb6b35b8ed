// The program sparsify as a user runs it.
#include <filesystem>
#include <fstream>

#include "tests/cli/command.h"
#include "tests/support/catch.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/npy.h"

using namespace topknot;

namespace {

struct Bench {
  TempFolder temp;
  std::string input = temp.at("g.npy"), out = temp.at("out.jsonl");
  Bench() { write_npy(input, {2, 2, 3}, std::vector<float>{1, -4, 2, 0.5f, 0, 8, 1, 1, 1, 2, 2, 2}); }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(temp.str()),
                                                  std::filesystem::directory_iterator()));
  }
};

void check_sparsify_refuses(const CommandOutcome& outcome, std::initializer_list<const char*> words) {
  check_refused(outcome, words, "sparsify: ");
}

}  // namespace

TEST_CASE("sparsify writes its lines and sums them up") {
  const Bench bench;
  const CommandOutcome outcome =
      sparsify(bench.input + " --compressor topk --density 0.4 --weights 1,3 --out " + bench.out);
  INFO(outcome.output);
  CHECK(outcome.code == 0);
  CHECK(outcome.has("2 steps of 2 ranks, 3 elements; mean count 1 = 1 k"));
  CHECK(outcome.has("24 up, 24 down; dense over up: 0.5"));
  const std::string lines = text_of(bench.out);
  CHECK(lines.starts_with(
      R"({"step":0,"rank":0,"count":1,"threshold":4,"indices":[1],"values":[-4],"bytes_up":24})"));
  CHECK(contains(lines,
                 "\n"
                 R"({"step":0,"aggregate":true,"indices":[1,2],"values":[-1,6],)"
                 R"("bytes_down":[24,24],"dense_bytes":12})"
                 "\n"));
  CHECK(bench.files() == 2);
}

TEST_CASE("sparsify writes to standard output, to links and to devices without replacing them") {
  const Bench bench;
  const std::string command = bench.input + " --compressor topk memory=none --density 1 --out ";
  const CommandOutcome outcome = sparsify(command + "-");
  CHECK(outcome.code == 0);
  CHECK(outcome.count("\"aggregate\":true") == 2);
  CHECK(sparsify(command + "/dev/stdout | cat").count("\"aggregate\":true") == 2);
  CHECK(std::filesystem::is_character_file("/dev/null"));
  CHECK(sparsify(command + "/dev/null").code == 0);
  CHECK(std::filesystem::is_character_file("/dev/null"));
  bench.temp.write("real.jsonl", {});
  std::filesystem::create_symlink("real.jsonl", bench.temp.at("link.jsonl"));
  CHECK(sparsify(command + bench.temp.at("link.jsonl")).code == 0);
  CHECK(std::filesystem::is_symlink(bench.temp.at("link.jsonl")));
  CHECK(std::filesystem::file_size(bench.temp.at("real.jsonl")) > 0);
}

TEST_CASE("sparsify prints its help, and the compressors") {
  check_help(sparsify, {"--weights", "--tensors", "Examples", "key=value"});
  const CommandOutcome list = sparsify("--list");
  CHECK(list.has("\ntopk  "));
  CHECK(list.has("dense  "));
}

TEST_CASE("sparsify validates its arguments") {
  const Bench bench;
  const std::string out = " --out " + bench.out;
  check_sparsify_refuses(sparsify("--compressor topk" + out), {"no input"});
  check_sparsify_refuses(sparsify(bench.input + out), {"--compressor", "--list"});
  check_sparsify_refuses(sparsify(bench.input + " --compressor topk"), {"--out"});
  check_sparsify_refuses(sparsify(bench.input + " --compresor topk" + out), {"--compresor", "--help"});
  check_sparsify_refuses(sparsify(bench.input + " --compressor topk --density 2" + out),
                         {"compress.density", "2"});
  check_sparsify_refuses(sparsify(bench.input + " --compressor gausiank" + out),
                         {"did you mean", "gaussiank"});
  check_sparsify_refuses(sparsify(bench.temp.at("absent.npy") + " --compressor topk" + out),
                         {"absent.npy", "No such file"});
  check_sparsify_refuses(sparsify(bench.temp.str() + " --compressor topk" + out), {"is a folder"});
  CHECK(bench.files() == 1);
}

TEST_CASE("sparsify refuses outputs that cannot be written, and leaves nothing") {
  const Bench bench;
  const std::string command = bench.input + " --compressor topk --out ";
  check_sparsify_refuses(sparsify(command + bench.temp.at("no/out.jsonl")), {"no/out.jsonl", "No such file"});
  check_sparsify_refuses(sparsify(command + bench.temp.str()), {"is a folder"});
  check_sparsify_refuses(sparsify(command + bench.input), {"is the input"});
  const TempFolder other;
  other.write("g.npy", {'o'});
  check_sparsify_refuses(sparsify(command + other.at("g.npy")), {"g.npy: exists already"});
  check_sparsify_refuses(sparsify(command + "/dev/full"), {"/dev/full", "No space left"});
  CHECK(sparsify(command + "- > /dev/full").code == 2);
  CHECK(bench.files() == 1);
}

TEST_CASE("sparsify leaves an earlier output as it was where a run fails") {
  const Bench bench;
  bench.temp.write("out.jsonl", {'o', 'l', 'd'});
  // A limit on the size of files stands in for a disk that fills up on the way.
  write_npy(bench.input, {400, 100}, std::vector<float>(40000, 1.0f));
  const CommandOutcome outcome =
      run_command("trap \"\" XFSZ; ulimit -f 16; " TOPKNOT_BIN "/sparsify " + bench.input +
                  " --compressor topk --density 1 --out " + bench.out);
  check_sparsify_refuses(outcome, {"out.jsonl", "File too large"});
  CHECK(std::filesystem::file_size(bench.out) == 3);
  CHECK(bench.files() == 2);
}

TEST_CASE("sparsify that is interrupted leaves nothing but an earlier output") {
  const Bench bench;
  const std::string big = bench.temp.at("big.npy");
  write_npy(big, {2000, 20000}, std::vector<float>(2000 * 20000, 1.0f));
  std::ofstream(bench.out) << "earlier";
  // The part appears when the run has begun.
  const CommandOutcome outcome =
      run_command("exec 3>&1; " TOPKNOT_BIN "/sparsify " + big + " --compressor topk --density 0.5 --out " +
                  bench.out + " >&3 2>&1 & p=$!; until ls " + bench.temp.str() +
                  " | grep -q part; do sleep 0.01; done; kill -INT $p; wait $p");
  INFO(outcome.output);
  CHECK(outcome.code == 130);
  CHECK(outcome.has("interrupted; no output was written"));
  CHECK(bench.files() == 3);
  CHECK(text_of(bench.out) == "earlier");
}

TEST_CASE("sparsify reports keys without effect, and takes a key once") {
  const Bench bench;
  const std::string command = bench.input + " --out " + bench.out + " --compressor ";
  CHECK(sparsify(command + "topk mu=3").has("note: compress.mu is for regtopk and changes nothing here"));
  CHECK(sparsify(command + "powersgd").has("note: without --tensors the input is one vector"));
  CHECK_FALSE(sparsify(command + "powersgd --tensors 3").has("note: without"));
  check_sparsify_refuses(sparsify(command + "topk --density 0.1 density=0.2"), {"given twice"});
}
