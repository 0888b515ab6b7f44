/* Preloaded in the guests of scripts/rdma.sh. Mooncake and UCX set a queue pair's retry count to 7,
 * after which a NIC ends the request with an error. Soft-RoCE treats 7 as unlimited (Linux,
 * drivers/infiniband/sw/rxe/rxe_comp.c, COMPST_ERROR_RETRY), so this library sets 6 instead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    int (*next)(struct ibv_qp *, struct ibv_qp_attr *, int) = dlsym(RTLD_NEXT, "ibv_modify_qp");
    struct ibv_qp_attr bounded = *attr;

    if ((mask & IBV_QP_RETRY_CNT) && bounded.retry_cnt == 7)
        bounded.retry_cnt = 6;
    return next(qp, &bounded, mask);
}
