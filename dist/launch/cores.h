#pragma once
// The cores that this process may use, and those next to a GPU: on hosts with several sockets, memory and bus are further
// from the others.

#include <filesystem>
#include <string>
#include <vector>

namespace topknot {

// "0-3,8,10-11" as Linux writes lists of cores; empty where it is no such list.
std::vector<int> parse_core_list(const std::string& list);

// Keeps this thread, and those that it starts from now on, to those of its cores that are next to the PCI device, such as
// "0000:3B:00.0". Returns how many these are; 0 where nothing changed: the system does not tell, none of them may be used, or
// all cores that may be used are near.
int keep_to_cores_near(const std::string& pci_device,
                       const std::filesystem::path& devices = "/sys/bus/pci/devices");

// The least CPU quota, in cores, of the control groups of a process (its /proc/PID/cgroup) and of those above them, version 1
// or 2, mounted at `mount`. Infinity if there is none or it cannot be read.
double cpu_quota(const std::filesystem::path& groups = "/proc/self/cgroup",
                 const std::filesystem::path& mount = "/sys/fs/cgroup");

// The cores of the affinity mask, or the whole ones of the CPU quota if these are fewer; at least 1.
int usable_cores();

}  // namespace topknot
