#pragma once
// The views of an elastic run: which ranks go on together, and where they meet. One process makes them, the launcher on
// one host (launch_spawn.cpp) or `train --coordinate` on several (coordinate.cpp), and tells the ranks: ViewServer. A rank
// whose collective has failed, or that hears of a view after a step, joins the next one: Rejoin.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/launch/launch.h"
#include "dist/rendezvous/tcp_store.h"

namespace topknot {

// Which ranks of an elastic run go on together, and where they meet.
struct View {
  int number = 1;          // the first one is of all ranks
  std::vector<int> ranks;  // as they were started; the place in here is the rank in the view, new ones' last
  int port = 0;
};

struct Rejoin {
  // Joins the next view after `view`, which becomes that one; null if the run ends without this rank. Throws as
  // join_group(), UserError if no view is announced for half a minute because no rank has died, and
  // Interrupted. For a rank that joins a run, `view` has no ranks until it has succeeded.
  std::function<std::unique_ptr<Communicator>(View& view)> join = {};
  // Whether there is a view after the one of this number. Cheap: asked after every step.
  std::function<bool(int number)> announced = {};
};
// For a rank with LaunchPlan::views.
Rejoin make_rejoin(const LaunchPlan& plan, const DistOptions& options);

// For a rank with LaunchPlan::joins_after: joins the run in the first view that takes it, which `view` becomes; null if
// the run has ended. Throws as Rejoin::join, and UserError if options.run is not LaunchPlan::run.
std::unique_ptr<Communicator> join_run(const LaunchPlan& plan, const DistOptions& options, View& view);

// Where the first view meets; 0 if LaunchPlan::views has none yet.
int first_port(const std::string& views);

// The views' rendezvous, in the process that looks after the ranks; view 1 is of all of them.
class ViewServer {
 public:
  // `publish` adds a line to what the ranks read, LaunchPlan::views.
  ViewServer(std::string host, int port, int ranks, const DistOptions& options, std::string token,
             std::function<void(const std::string& line)> publish);

  TcpStoreServer& store() { return *stores_.back(); }
  int number() const { return view_.number; }
  int last_number() const { return last_number_; }  // of an invitation too
  const std::vector<int>& ranks() const { return view_.ranks; }
  // Ranks that have not come to the newest view; one alone need not.
  std::vector<int> missing();
  // One of these ranks that the others wait for in vain, and why; -1: none.
  std::pair<int, std::string> hanging(const std::vector<int>& running);

  void publish() const;  // the newest view
  void next(std::vector<int> ranks, const std::string& reason);
  // A view with one more rank, which is to come before the others hear of it.
  bool invited() const { return invited_.has_value(); }
  void invite(int rank);
  void uninvite(const std::string& reason);
  bool guest_came() const { return invited_ && guests_.back()->missing().size() < invited_->ranks.size(); }
  void admit();
  void end();

 private:
  std::unique_ptr<TcpStoreServer> make_store(int port, std::size_t ranks, double timeout_s) const;
  void open(int port);
  void take(std::unique_ptr<TcpStoreServer> store);

  const std::string host_;
  const DistOptions& options_;
  const std::string token_;
  const std::function<void(const std::string&)> publish_;
  View view_;
  int last_number_ = view_.number;
  std::optional<View> invited_;
  bool admitted_ = false;  // the newest view has a rank that was invited; the others come in their own time
  Patience joining_;
  std::vector<std::unique_ptr<TcpStoreServer>> stores_;  // by view; earlier ones tell their ranks the reason
  std::vector<std::vector<int>> members_;                // their ranks
  std::vector<std::unique_ptr<TcpStoreServer>> guests_;  // of views that were invited to
};

}  // namespace topknot
