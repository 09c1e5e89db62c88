// Interrupts the kernel through the notebook server's REST API, if the kernel is too busy to read messages.
// Works only if the page contains the server's address: JupyterLab and Notebook, not VS Code or Colab.

export interface CommandResult {
  ok: boolean;
  text: string;
}

interface Server {
  baseUrl: string;
  token: string;
}

/** Return the server of this page; null if the page does not contain it. */
export function server(page: Document = document): Server | null {
  const config = page.getElementById("jupyter-config-data")?.textContent;
  if (!config) return null;
  try {
    const { baseUrl, token } = JSON.parse(config) as Record<string, unknown>;
    if (typeof baseUrl !== "string") return null;
    return { baseUrl, token: typeof token === "string" ? token : "" };
  } catch (problem) {
    if (problem instanceof SyntaxError) return null;
    throw problem;
  }
}

/** Interrupt a kernel through its server's REST API. Returns the result as text. */
export async function interruptKernel(kernelId: string | null): Promise<CommandResult> {
  const notebookServer = server();
  // The ID becomes part of a URL; Jupyter's IDs contain only letters, digits and hyphens.
  if (!notebookServer || !kernelId || !/^[\w-]{1,64}$/.test(kernelId)) {
    return failed("the kernel is busy and does not respond: use the notebook's own interrupt button");
  }
  const base = new URL(notebookServer.baseUrl, document.baseURI);
  if (base.origin !== new URL(document.baseURI).origin) {
    return failed("this page's server is on another machine: use the notebook's own interrupt button");
  }
  const headers: Record<string, string> = { "X-XSRFToken": cookie("_xsrf") };
  if (notebookServer.token) headers.Authorization = `token ${notebookServer.token}`;
  const path = `${base.pathname.replace(/\/?$/, "/")}api/kernels/${kernelId}/interrupt`;
  try {
    const reply = await fetch(path, { method: "POST", headers, credentials: "same-origin" });
    if (reply.ok) return { ok: true, text: "interrupted through the notebook server" };
    return failed(`the notebook server refused the interrupt (${reply.status})`);
  } catch (problem) {
    if (problem instanceof TypeError) return failed("the notebook server does not respond");
    throw problem;
  }
}

function failed(text: string): CommandResult {
  return { ok: false, text };
}

function cookie(name: string): string {
  const pair = document.cookie.split("; ").find((text) => text.startsWith(`${name}=`));
  return pair ? decodeURIComponent(pair.slice(name.length + 1)) : "";
}
