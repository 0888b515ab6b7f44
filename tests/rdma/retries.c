/* Preloaded in the guest of scripts/rdma.sh. Mooncake and UCX let a queue pair send a request seven
 * times more, and a NIC then ends it with an error. Soft-RoCE sends it for ever if they are seven, and
 * counts any smaller number (Linux, drivers/infiniband/sw/rxe/rxe_comp.c, COMPST_ERROR_RETRY). */
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
