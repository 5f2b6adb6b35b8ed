#pragma once
// What tests set and see of the emulated NCCL. Its ranks are threads of one process, each with a device of
// its own. fail("ncclAllGather", ncclSystemError) and the like make calls fail; fail("NCCL in a graph of rank 1",
// code) those that rank 1 makes in a capture, and with them, as in NCCL, all later ones of the communicator;
// fail("ncclCommGetAsyncError", code) is what the communicators say of themselves, ncclInProgress for ever included. A rank that makes no
// call, or has aborted, leaves its peers' kernels waiting until they abort too.

namespace topknot::emulator {

void set_nccl_version(int version);  // for this thread
int nccl_aborts();                   // calls of ncclCommAbort, ever
int nccl_communicators();            // that are neither destroyed nor aborted

}  // namespace topknot::emulator
