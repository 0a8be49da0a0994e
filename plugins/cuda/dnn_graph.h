/* SPDX-License-Identifier: Apache-2.0
 *
 * Between dnn.c, which opens the library and runs plans, and dnn_graph.c, which describes
 * attention to it operation by operation.
 */
#ifndef MT_CUDA_DNN_GRAPH_H
#define MT_CUDA_DNN_GRAPH_H

#include "dnn.h"

#include <cudnn_graph.h>

/* The library's functions that are used. */
#define DNN_FUNCTIONS(X)                                                                           \
    X(cudnnGetVersion)                                                                             \
    X(cudnnGetErrorString)                                                                         \
    X(cudnnGetLastErrorString)                                                                     \
    X(cudnnCreate)                                                                                 \
    X(cudnnDestroy)                                                                                \
    X(cudnnSetStream)                                                                              \
    X(cudnnBackendCreateDescriptor)                                                                \
    X(cudnnBackendDestroyDescriptor)                                                               \
    X(cudnnBackendSetAttribute)                                                                    \
    X(cudnnBackendGetAttribute)                                                                    \
    X(cudnnBackendFinalize)                                                                        \
    X(cudnnBackendExecute)

typedef struct dnn_api {
#define DNN_MEMBER(f) __typeof__(f) *f;
    DNN_FUNCTIONS(DNN_MEMBER)
#undef DNN_MEMBER
} dnn_api;

/* Numbers that a graph takes by value when it runs. */
typedef enum { DNN_SCALE, DNN_SOFTCAP, DNN_WINDOW, DNN_LOWEST, DNN_ONE } dnn_scalar;

/* Names of tensors within a graph. */
enum {
    DNN_UID_TENSOR = 1,  /* + tensor */
    DNN_UID_STARTS = 20, /* + tensor */
    DNN_UID_LENGTHS_Q = 40,
    DNN_UID_LENGTHS_K = 41,
    DNN_UID_SUMS = 42,
    DNN_UID_SCALAR = 50,
    DNN_UID_VIRTUAL = 100,
    DNN_MAX_SCALARS = 8,
    DNN_MAX_OPS = 48,
    DNN_MAX_DESCRIPTORS = 256
};

/* A graph, and every descriptor made for it: they live as long as its plan. */
typedef struct dnn_graph {
    const dnn_api *api;
    cudnnStatus_t status; /* the first failure, and in which call */
    const char *failed;
    char text[256];
    cudnnBackendDescriptor_t made[DNN_MAX_DESCRIPTORS];
    int n_made;
    cudnnBackendDescriptor_t op[DNN_MAX_OPS];
    int n_ops;
    dnn_scalar scalar[DNN_MAX_SCALARS];
    int n_scalars;
    int64_t n_virtual;
    /* Which table of starts each tensor goes by: tensors with equal rows share one. */
    int starts_of[DNN_TENSORS];
    cudnnBackendDescriptor_t graph; /* CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR */
} dnn_graph;

/* `handle` NULL: none is set. False, with the failure in `ret`, where a descriptor is refused;
 * dnn_graph_finish either way. */
bool dnn_graph_init(dnn_graph *ret, const dnn_api *api, cudnnHandle_t handle,
                    const dnn_shape *shape);
void dnn_graph_finish(dnn_graph *g);

/* For what follows the graph: descriptors that end with it, failures that are kept. */
cudnnBackendDescriptor_t dnn_descriptor(dnn_graph *g, cudnnBackendDescriptorType_t type);
bool dnn_check(dnn_graph *g, cudnnStatus_t status, const char *what);
void dnn_set(dnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
             cudnnBackendAttributeType_t type, int64_t count, const void *values, const char *what);
bool dnn_finalize(dnn_graph *g, cudnnBackendDescriptor_t d, const char *what);

/* dnn_set with the attribute's name for the log. */
#define DNN_SET(g, d, name, type, count, values) dnn_set(g, d, name, type, count, values, #name)

#endif
