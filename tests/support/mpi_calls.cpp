// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "support/mpi_calls.hpp"

#include <mpi.h>

namespace {
void record(const char* name) {
  using fsdp2::test::calls;
  if (calls == nullptr) return;
  if (calls->empty() && fsdp2::test::at_first_call) fsdp2::test::at_first_call();
  calls->emplace_back(name);
}
}  // namespace

// The calls that the library uses or might come to use; the linker prefers these to MPI's own.
extern "C" {
int MPI_Allreduce(const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, MPI_Comm c) {
  record("Allreduce");
  return PMPI_Allreduce(a, b, n, t, o, c);
}
int MPI_Reduce(const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, int r, MPI_Comm c) {
  record("Reduce");
  return PMPI_Reduce(a, b, n, t, o, r, c);
}
int MPI_Bcast(void* b, int n, MPI_Datatype t, int r, MPI_Comm c) {
  record("Bcast");
  return PMPI_Bcast(b, n, t, r, c);
}
int MPI_Barrier(MPI_Comm c) {
  record("Barrier");
  return PMPI_Barrier(c);
}
int MPI_Allgather(const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c) {
  record("Allgather");
  return PMPI_Allgather(a, n, t, b, m, u, c);
}
int MPI_Allgatherv(const void* a, int n, MPI_Datatype t, void* b, const int* m, const int* d, MPI_Datatype u,
                   MPI_Comm c) {
  record("Allgatherv");
  return PMPI_Allgatherv(a, n, t, b, m, d, u, c);
}
int MPI_Gather(const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, int r, MPI_Comm c) {
  record("Gather");
  return PMPI_Gather(a, n, t, b, m, u, r, c);
}
int MPI_Alltoall(const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c) {
  record("Alltoall");
  return PMPI_Alltoall(a, n, t, b, m, u, c);
}
int MPI_Iallgather(const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c, MPI_Request* r) {
  record("Iallgather");
  return PMPI_Iallgather(a, n, t, b, m, u, c, r);
}
int MPI_Ialltoall(const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c, MPI_Request* r) {
  record("Ialltoall");
  return PMPI_Ialltoall(a, n, t, b, m, u, c, r);
}
int MPI_Ialltoallv(const void* a, const int* n, const int* d, MPI_Datatype t, void* b, const int* m, const int* e,
                   MPI_Datatype u, MPI_Comm c, MPI_Request* r) {
  record("Ialltoallv");
  return PMPI_Ialltoallv(a, n, d, t, b, m, e, u, c, r);
}
int MPI_Ibcast(void* b, int n, MPI_Datatype t, int r, MPI_Comm c, MPI_Request* q) {
  record("Ibcast");
  return PMPI_Ibcast(b, n, t, r, c, q);
}
int MPI_Iallreduce(const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, MPI_Comm c, MPI_Request* r) {
  record("Iallreduce");
  return PMPI_Iallreduce(a, b, n, t, o, c, r);
}
int MPI_Ibarrier(MPI_Comm c, MPI_Request* r) {
  record("Ibarrier");
  return PMPI_Ibarrier(c, r);
}
int MPI_Send(const void* b, int n, MPI_Datatype t, int d, int g, MPI_Comm c) {
  record("Send");
  return PMPI_Send(b, n, t, d, g, c);
}
int MPI_Recv(void* b, int n, MPI_Datatype t, int s, int g, MPI_Comm c, MPI_Status* st) {
  record("Recv");
  return PMPI_Recv(b, n, t, s, g, c, st);
}
int MPI_Isend(const void* b, int n, MPI_Datatype t, int d, int g, MPI_Comm c, MPI_Request* r) {
  record("Isend");
  return PMPI_Isend(b, n, t, d, g, c, r);
}
int MPI_Irecv(void* b, int n, MPI_Datatype t, int s, int g, MPI_Comm c, MPI_Request* r) {
  record("Irecv");
  return PMPI_Irecv(b, n, t, s, g, c, r);
}
int MPI_Comm_dup(MPI_Comm c, MPI_Comm* d) {
  record("Comm_dup");
  return PMPI_Comm_dup(c, d);
}
int MPI_Comm_split(MPI_Comm c, int color, int key, MPI_Comm* d) {
  record("Comm_split");
  return PMPI_Comm_split(c, color, key, d);
}
int MPI_Comm_free(MPI_Comm* c) {
  record("Comm_free");
  return PMPI_Comm_free(c);
}
int MPI_Comm_create(MPI_Comm c, MPI_Group g, MPI_Comm* d) {
  record("Comm_create");
  return PMPI_Comm_create(c, g, d);
}
int MPI_File_open(MPI_Comm c, const char* n, int m, MPI_Info i, MPI_File* f) {
  record("File_open");
  return PMPI_File_open(c, n, m, i, f);
}
}
