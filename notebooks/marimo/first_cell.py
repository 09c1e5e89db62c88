"""Your first cell on every rank, in marimo: `marimo edit notebooks/marimo/first_cell.py`."""

import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo

    import nbdist

    return mo, nbdist


@app.cell
def _(mo):
    mo.md("""
    # Your first cell on every rank

    marimo has no magics, so ranks are used through `nbdist.Session` and `@nbdist.distribute`. The
    cell below starts two CPU ranks, or one on each GPU. When it runs again, the ranks and their
    variables are replaced by new ones.
    """)
    return


@app.cell
def _(nbdist):
    if nbdist.session() is not None:
        nbdist.session().stop()
    session = nbdist.Session(backend="fsdp2").start()
    return (session,)


@app.cell
def _(mo):
    mo.md("""
    `session.run()` runs a string as a cell of the ranks. Lines are labelled with their ranks and
    appear in the console below the cell.
    """)
    return


@app.cell
def _(session):
    session.run("""
    print(f"this is rank {rank} of {world_size}, on {device}")
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    With `@nbdist.distribute`, the body of a function runs on the ranks, and a call returns the
    value of each rank. The interrupt button stops the ranks too; what they have trained is kept.
    """)
    return


@app.cell
def _(mo):
    steps = mo.ui.slider(20, 200, step=20, value=60, label="steps", show_value=True)
    steps
    return (steps,)


@app.cell
def _(nbdist, session, steps):
    @nbdist.distribute
    def train(steps):
        import torch
        from tqdm import tqdm

        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)  # noqa: F821 - on the ranks
        inputs = torch.randn(64, 16, device=accelerator.device)  # noqa: F821
        for _ in tqdm(range(steps), desc="training"):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)  # noqa: F821
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)  # noqa: F821
        return loss.item()

    session.panel()
    losses = train(steps.value)
    return (losses,)


@app.cell
def _(losses, mo):
    mo.md("The last losses: " + ", ".join(f"rank {n}: {loss:.3f}" for n, loss in enumerate(losses)))
    return


if __name__ == "__main__":
    app.run()
