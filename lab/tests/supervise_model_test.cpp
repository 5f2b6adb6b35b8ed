// The coordinator of elastic runs, supervise() and ViewServer, against model ranks: every order of what can happen to three
// of them, up to a number of events. The ranks are this file's: they connect to the views' stores as processes do, and
// what happens to them is decided in the supervisor's own loop, so that a history is the same each time. Histories that
// lead to the same state are followed once. After each one nothing more happens: the ranks come to the views that they
// are told of, end the training, and the run must have ended with the right exit code.
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <deque>
#include <set>
#include <sstream>
#include <thread>

#include "dist/launch/supervise.h"
#include "nn/base/log.h"
#include "nn/base/program.h"

using namespace topknot;

namespace {

constexpr int kRanks = 3;
constexpr int kEvents = 3;    // of a history, beyond those that it begins with
constexpr int kAtOnce = 160;  // histories; they do nothing but wait
// For what supervise() does after a while: kMoreDeathsSeconds, and a turn of its loop.
constexpr auto kSettles = std::chrono::milliseconds(170);
constexpr double kLongestSeconds = 20;  // for ranks to come or to end; a run that nobody ends is a fault

// What happens to a rank; `settle` and `done` to all.
enum class Happens { joins, killed, fails, leaves, hangs, returns, ends, done, settle };
struct Event {
  Happens what;
  int rank = 0;
  std::string text() const {
    static const char* const names[] = {"joins", "killed", "fails", "leaves", "hangs", "returns", "ends"};
    if (what == Happens::done) return "done";
    if (what == Happens::settle) return "settle";
    return fmt::format("{} {}", rank, names[static_cast<int>(what)]);
  }
};
using History = std::vector<Event>;

std::string text_of(const History& history) {
  std::string text;
  for (const Event& event : history) text += (text.empty() ? "" : ", ") + event.text();
  return text;
}

struct Line {
  bool waits = false;
  View view;
};

class Model : public Ranks {
 public:
  Model(const History& history, int min_ranks) : history_(history), min_ranks_(min_ranks) {}

  // After the last event of the history.
  std::string state;
  std::vector<Event> enabled;
  std::vector<std::string> faults;

  void publish(const std::string& text) {
    Line line;
    line.waits = text.front() == '+';
    std::istringstream words(text.substr(line.waits));
    words >> line.view.number >> line.view.port;
    for (int rank; words >> rank;) line.view.ranks.push_back(rank);
    check_view(line);
    lines_.push_back(line);
  }
  void served_by(ViewServer& views) { views_ = &views; }

  std::vector<int> running() const override {
    std::vector<int> ranks;
    for (int r = 0; r < kRanks; ++r)
      if (processes_[at(r)].runs) ranks.push_back(r);
    return ranks;
  }

  std::optional<Ending> next_ended() override {
    if (!std::exchange(acted_, true)) act();
    if (endings_.empty()) {
      acted_ = false;
      // The next turn of the supervisor's loop comes at once, but where its time must pass.
      if (!settling_) pthread_kill(pthread_self(), SIGCHLD);
      return {};
    }
    const Ending ending = endings_.front();
    endings_.pop_front();
    processes_[at(ending.rank)].runs = processes_[at(ending.rank)].guest = false;
    settled_ = false;
    return ending;
  }

  void signal_all(int signal) override {
    told_to_end_ = true;
    for (int r = 0; r < kRanks; ++r)
      if (lives(r) && (signal == SIGKILL || !processes_[at(r)].hangs))
        end(r, signal == SIGKILL ? Ending{r, 0, SIGKILL} : Ending{r, 128 + signal});
  }
  void kill_one(int rank, const std::string& why) override {
    // All come where they are told to: none but a rank that wants to join a run that is over is shut out.
    const Process& process = processes_[at(rank)];
    if (!(process.guest && why == "came too late") && !process.hangs)
      fault(fmt::format("rank {} is killed: {}", rank, why));
    if (!lives(rank)) return;
    lose(rank);
    end(rank, {rank, 0, SIGKILL});
  }
  std::optional<int> newcomer(std::vector<int>& gone, int after) override {
    if (waiting_.empty()) return {};
    const int rank = waiting_.front();
    waiting_.erase(waiting_.begin());
    std::erase(gone, rank);
    processes_[at(rank)] = {.runs = true, .lives = true, .guest = true, .after = after};
    return rank;
  }

  void check_code(int code) {
    const bool failed = failed_ || too_few_ || ended_ == 0;
    if (failed == (code == 0) && !unsure_)
      fault(fmt::format("exit code {} of a run that {}", code, failed ? "failed" : "went on"));
  }

 private:
  struct Process {
    bool runs = false;  // and the supervisor has not heard of its end
    bool lives = false;
    bool guest = false;  // and has not been in a view that all came to
    int after = 0;
    int view = 0;  // that it joined
    std::vector<Fd> connections = {};
    bool finishing = false, hangs = false;
  };
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  bool lives(int rank) const { return processes_[at(rank)].lives; }
  void fault(const std::string& text) { faults.push_back(text); }

  // The newest view that a rank goes to; one without ranks: the run ends.
  const Line* goes_to(int rank) const {
    const Process& process = processes_[at(rank)];
    const Line* newest = nullptr;
    for (const Line& line : lines_) {
      const bool in = std::ranges::count(line.view.ranks, rank) > 0;
      if (process.guest ? line.view.number > process.after && (in || line.view.ranks.empty()) : !line.waits)
        newest = &line;
    }
    return newest && newest->view.number > process.view && !process.finishing && !process.hangs ? newest
                                                                                                : nullptr;
  }
  const View& newest() const {
    const Line* line = nullptr;
    for (const Line& one : lines_)
      if (!one.waits && !one.view.ranks.empty()) line = &one;
    return line->view;
  }
  bool all_came() const {
    return std::ranges::all_of(newest().ranks, [&](int r) {
      return processes_[at(r)].lives && processes_[at(r)].view == newest().number;
    });
  }
  bool complete() const {  // and nobody hangs
    return all_came() && std::ranges::none_of(newest().ranks, [&](int r) { return processes_[at(r)].hangs; });
  }

  void check_view(const Line& line) {
    if (!lines_.empty() && line.view.number <= lines_.back().view.number &&
        !(lines_.back().waits && line.view.port == lines_.back().view.port))
      fault(fmt::format("view {} after {}", line.view.number, lines_.back().view.number));
    if (line.view.ranks.empty() || lines_.empty()) return;
    const View& former = newest();
    for (const int r : line.view.ranks)
      if (!processes_[at(r)].runs)
        fault(fmt::format("view {} has rank {}, which is gone", line.view.number, r));
    for (const int r : former.ranks)
      if (processes_[at(r)].runs && !processes_[at(r)].guest && std::ranges::count(line.view.ranks, r) == 0)
        fault(fmt::format("view {} leaves out rank {}, which lives", line.view.number, r));
    if (static_cast<int>(line.view.ranks.size()) < min_ranks_ && ended_ == 0)
      fault(fmt::format("view {} has too few ranks", line.view.number));
  }

  void end(int rank, const Ending& ending) {
    Process& process = processes_[at(rank)];
    if (ending.signal == 0 && ending.code == 0)
      for (const Fd& fd : process.connections)
        write_all(fd.get(), encode_frame(Frame::leave, ""), deadline_in(1));
    process.lives = false;
    process.connections.clear();
    endings_.push_back(ending);
  }

  void join(int rank) {
    const Line& line = *goes_to(rank);
    Process& process = processes_[at(rank)];
    const auto place = std::ranges::find(line.view.ranks, rank);
    if (place == line.view.ranks.end()) {  // the run ends without it
      end(rank, {rank, 1});
      return;
    }
    process.view = line.view.number;
    const bool alone = line.view.ranks.size() == 1;
    Fd fd = connect_to("127.0.0.1", line.view.port, Patience(5));
    write_all(fd.get(),
              encode_frame(Frame::hello, encode_hello({static_cast<int>(place - line.view.ranks.begin()),
                                                       static_cast<int>(line.view.ranks.size()), "t"})),
              deadline_in(1));
    process.connections.push_back(std::move(fd));
    const auto heard = [&] {
      if (line.waits) return !views_->invited() || views_->guest_came();
      const std::vector<int> missing = views_->missing();
      return alone || line.view.number != views_->number() || std::ranges::count(missing, rank) == 0;
    };
    for (Patience patience(1); !heard() && !patience.over();)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (all_came()) {
      met_ = true;
      for (const int r : newest().ranks) processes_[at(r)].guest = false;
    }
  }

  void happen(const Event& event) {
    const int r = event.rank;
    switch (event.what) {
      case Happens::joins:
        return join(r);
      case Happens::killed:
        lose(r);
        return end(r, {r, 0, SIGKILL});
      case Happens::fails:
        failed_ = failed_ || !processes_[at(r)].guest;
        lose(r);
        return end(r, {r, 1});
      case Happens::leaves:
        lose(r);
        return end(r, {r, complete() ? kLeaves : 128 + SIGTERM});
      case Happens::hangs:
        processes_[at(r)].hangs = hung_ = true;
        return;
      case Happens::returns:
        return waiting_.push_back(r);
      case Happens::ends:
        ++ended_;
        return end(r, {r, 0});
      case Happens::done:
        done_ = true;
        for (const int member : newest().ranks) processes_[at(member)].finishing = true;
        return;
      case Happens::settle:
        settling_ = Clock::now() + kSettles;
        return;
    }
  }
  // A rank of the run is gone: whether the others can go on.
  void lose(int rank) {
    if (processes_[at(rank)].guest) return;
    int left = 0;
    for (int r = 0; r < kRanks; ++r) left += r != rank && lives(r) && !processes_[at(r)].guest;
    if (!met_ || left < min_ranks_) (done_ ? unsure_ : too_few_) |= ended_ == 0;
  }

  // One event in each turn of the supervisor's loop: the history's, then those of ranks that do as they are told.
  void act() {
    for (Process& process : processes_)
      for (const Fd& fd : process.connections) {
        if (process.hangs) continue;
        const std::uint64_t calls = hung_;  // the others have begun what it has not
        write_all(fd.get(), encode_frame(Frame::beat, {reinterpret_cast<const char*>(&calls), sizeof calls}),
                  deadline_in(1));
      }
    if (patience_.over()) {
      fault("nobody ends it");
      return signal_all(SIGKILL);
    }
    if (settling_) {
      if (Clock::now() < *settling_) return;
      settling_.reset();
      settled_ = true;
    }
    if (next_ < history_.size()) return happen(history_[next_++]);
    if (state.empty()) note_state();
    if (told_to_end_) return void(settling_ = Clock::now() + kSettles);
    for (int r = 0; r < kRanks; ++r)
      if (lives(r) && goes_to(r)) return join(r), void(settled_ = false);
    for (int r = 0; r < kRanks; ++r)
      if (lives(r) && processes_[at(r)].finishing && !processes_[at(r)].hangs)
        return happen({Happens::ends, r});
    // Nobody hears of a rank that hangs alone, as of a program of one process: the user ends it.
    std::vector<int> members;
    for (int r = 0; r < kRanks; ++r)
      if (lives(r) && !processes_[at(r)].guest) members.push_back(r);
    if (members.size() == 1 && processes_[at(members[0])].hangs) return happen({Happens::killed, members[0]});
    if (!settled_) return happen({Happens::settle});
    const bool all_in = waiting_.empty() && std::ranges::none_of(processes_, &Process::guest);
    if (complete() && (all_in || done_)) return happen({Happens::done});
    settling_ = Clock::now() + kSettles;
  }

  void note_state() {
    for (int r = 0; r < kRanks; ++r) {
      const Process& process = processes_[at(r)];
      const bool waits = std::ranges::count(waiting_, r) > 0;
      const int behind = newest().number - process.view;
      state += fmt::format("{}{}{}{}{}{}{} ", process.lives, process.runs, process.hangs, process.guest,
                           process.finishing, waits, process.lives ? std::min(behind, 3) : 0);
      const auto can = [&](Happens what) { enabled.push_back({what, r}); };
      if (process.lives) {
        can(Happens::killed);
        if (!process.hangs) can(Happens::fails), can(Happens::leaves);
        if (goes_to(r)) can(Happens::joins);
        if (process.finishing && !process.hangs) can(Happens::ends);
        if (met_ && !process.guest && !process.finishing && !process.hangs && newest().ranks.size() > 1 &&
            !hung_)
          can(Happens::hangs);
      } else if (!process.runs && !waits) {
        can(Happens::returns);
      }
    }
    const bool finishing = std::ranges::any_of(processes_, [](const Process& one) { return one.finishing; });
    if (complete() && !finishing && ended_ == 0) enabled.push_back({Happens::done});
    if (!settled_) enabled.push_back({Happens::settle});
    state += fmt::format("{}{}{}{}{}{}{}{} {} {}{}", met_, done_, unsure_, failed_, too_few_, settled_,
                         ended_, told_to_end_, fmt::join(newest().ranks, ""), std::min(newest().number, 4),
                         endings_.size());
    if (lines_.back().waits) state += fmt::format("+{}", lines_.back().view.ranks.size());
    if (lines_.back().view.ranks.empty()) state += "end";
    std::multiset<std::string> kinds;
    for (const auto& event : history_)  // what supervise() keeps of the ranks that it has lost
      if (event.what != Happens::joins && event.what != Happens::settle) kinds.insert(event.text());
    state += fmt::format(" {}", fmt::join(kinds, ","));
  }

  const History& history_;
  const int min_ranks_;
  ViewServer* views_ = nullptr;
  std::vector<Line> lines_;
  Process processes_[kRanks] = {{true, true}, {true, true}, {true, true}};
  std::vector<int> waiting_;
  std::deque<Ending> endings_;
  std::size_t next_ = 0;
  Patience patience_{kLongestSeconds + 10};
  std::optional<Clock::time_point> settling_;
  bool acted_ = false, settled_ = false, failed_ = false, met_ = false, done_ = false;
  bool too_few_ = false, hung_ = false, unsure_ = false, told_to_end_ = false;
  int ended_ = 0;
};

struct Result {
  std::string state;
  std::vector<Event> enabled;
  std::vector<std::string> faults;
};

Result run(const History& history, int min_ranks) {
  DistOptions options;
  options.min_ranks = min_ranks;
  options.timeout_s = kLongestSeconds;
  Model model(history, min_ranks);
  const SignalGate gate;
  ViewServer views("127.0.0.1", 0, kRanks, options, "t",
                   [&](const std::string& line) { model.publish(line); });
  model.served_by(views);
  views.publish();
  const int code = supervise(model, views, gate, options, 0.3);
  model.check_code(code);
  return {model.state, model.enabled, model.faults};
}

}  // namespace

TEST_CASE("an elastic run goes on, or ends, whatever happens to three ranks in whatever order") {
  const int min_ranks = GENERATE(1, 2);
  set_log_level(LogLevel::quiet);
  std::set<std::string> known;
  using enum Happens;
  const History all{{joins, 0}, {joins, 1}, {joins, 2}};
  const auto after_all = [&](History more) {
    more.insert(more.begin(), all.begin(), all.end());
    return more;
  };
  std::vector<History> histories{
      {},
      all,
      // A rank is about to be invited, by two and by one.
      after_all({{killed, 2}, {settle}, {joins, 0}, {joins, 1}, {returns, 2}, {settle}}),
      after_all({{killed, 0}, {returns, 0}, {killed, 1}, {settle}})};
  for (int events = 0; events <= kEvents; ++events) {
    std::vector<Result> results(histories.size());
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kAtOnce; ++t)
      threads.emplace_back([&] {
        for (std::size_t i; (i = next++) < histories.size();) results[i] = run(histories[i], min_ranks);
      });
    for (std::thread& thread : threads) thread.join();
    std::vector<History> longer;
    for (std::size_t i = 0; i < histories.size(); ++i) {
      INFO("elastic.min_ranks " << min_ranks << ": " << text_of(histories[i]));
      CHECK(results[i].faults == std::vector<std::string>());
      if (results[i].state.empty() || !known.insert(results[i].state).second) continue;
      for (const Event& event : results[i].enabled) {
        longer.push_back(histories[i]);
        longer.back().push_back(event);
      }
    }
    histories = std::move(longer);
  }
  CHECK(known.size() > 1000);
  set_log_level(LogLevel::info);
}
